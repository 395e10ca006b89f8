// The GPU kernels on threads of the host: ranks, blocks and threads run concurrently; kernels of
// one rank run in sequence, as on a stream.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "call_order.h"
#include "device_world.h"

namespace cpd::kernels {

class Barrier final : public BlockBarrier {
 public:
  explicit Barrier(int count) { pthread_barrier_init(&barrier_, nullptr, count); }
  ~Barrier() override { pthread_barrier_destroy(&barrier_); }
  void Wait() override { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

// Calls `run(kernel, block)` on each thread of each block, and waits for all. Threads know only the
// address of the kernel: with its type, each kernel would compile threads of its own.
inline void RunThreads(int num_blocks, int num_threads, void (*run)(const void*, const Block&),
                       const void* kernel) {
  std::vector<std::unique_ptr<Barrier>> barriers;
  std::vector<std::thread> threads;
  for (int b = 0; b < num_blocks; ++b) {
    barriers.push_back(std::make_unique<Barrier>(num_threads));
    for (int t = 0; t < num_threads; ++t) {
      const Block block{t, num_threads, b, num_blocks, barriers.back().get()};
      threads.emplace_back([=] { run(kernel, block); });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// Launches a kernel and waits for it.
template <typename Scratch, typename Kernel>
void Launch(int num_blocks, int num_threads, const Kernel& kernel) {
  std::vector<std::unique_ptr<Scratch>> scratch(num_blocks);
  for (auto& one : scratch) one = std::make_unique<Scratch>();
  const auto run = [&](const Block& block) { kernel(block, scratch[block.index].get()); };
  RunThreads(
      num_blocks, num_threads,
      [](const void* of, const Block& b) { (*static_cast<decltype(&run)>(of))(b); }, &run);
}

// Launches a kernel for all ranks of a device, with `num_blocks` for each, and waits for it.
template <typename Scratch, typename Kernel>
void LaunchRanks(const Call& call, int num_blocks, int num_threads, const Kernel& kernel) {
  Launch<Scratch>(num_blocks * call.num_local, num_threads, [&](Block block, Scratch* scratch) {
    const Rank rank{call, block.index / num_blocks};
    block.index %= num_blocks;
    block.num_blocks = num_blocks;
    kernel(block, rank, scratch);
  });
}

// A small call of a device, which runs `num_resident` blocks at once; 0: all of them.
inline void RunSmallCall(const Call& call, int num_threads, int num_resident = 0) {
  const auto run = [&](const Block& block, SmallScratch* scratch) {
    (call.is_dispatch ? RunSmall<true> : RunSmall<false>)(block, call, scratch);
  };
  const int num_parts = NumParts(call);
  std::atomic<int> next{0};
  std::vector<std::thread> places;
  for (int i = 0; i < (num_resident ? num_resident : num_parts); ++i) {
    places.emplace_back([&] {
      while (next++ < num_parts) Launch<SmallScratch>(1, num_threads, run);
    });
  }
  for (std::thread& place : places) place.join();
}

// The work of a device's stream for one call. Calls `meet` after this device has signalled and
// before it waits; not in a small call, which does both in one kernel.
template <typename Fabric = Mapped>
void RunCall(const Call& call, int blocks, int threads, const std::function<void()>& meet = [] {}) {
  if (!Fabric::kHasNetwork && call.is_small) return RunSmallCall(call, threads);
  const auto launch = [&](int num_blocks, auto* scratch, const auto& kernel) {
    LaunchRanks<std::remove_pointer_t<decltype(scratch)>>(call, num_blocks, threads, kernel);
  };
  LaunchInOrder<Fabric>(call, blocks, launch, meet);
}

// Calls `run` for each rank but `absent`, concurrently.
inline void Concurrently(World& world, int absent, const std::function<void(Call)>& run) {
  std::vector<Call> calls;
  for (int r = 0; r < world.num_ranks; ++r) calls.push_back(world.MakeCall(r));
  world.Clear();
  std::vector<std::thread> threads;
  for (int r = 0; r < world.num_ranks; ++r) {
    if (r != absent) threads.emplace_back(run, calls[r]);
  }
  for (std::thread& thread : threads) thread.join();
}

// All ranks; `times` calls without synchronization in between.
inline void RunRanks(World& world, int times = 1) {
  Concurrently(world, -1, [&](const Call& call) {
    for (int i = 0; i < times; ++i) RunCall(call, world.num_blocks, world.num_threads);
  });
}

// All ranks but `absent`. The deadline passes once all of these have signalled, and `deliver` has
// brought their signals.
template <typename Fabric = Mapped>
void RunWithout(World& world, int absent, const std::function<void()>& deliver = [] {}) {
  Barrier all(world.num_ranks - 1);
  Concurrently(world, absent, [&](Call call) {
    call.deadline_ns = 0;
    RunCall<Fabric>(call, world.num_blocks, world.num_threads, [&] {
      deliver();
      all.Wait();
    });
  });
}

}  // namespace cpd::kernels
