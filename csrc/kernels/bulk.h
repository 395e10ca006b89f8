// A second way to copy: one thread of a block moves chunks through the block's memory, and the copy
// engine of the multiprocessor does the work. For GPUs of compute capability 9.0 and newer.
//
// An engine has sizes, and steps that one thread of a block calls:
//   kChunkBytes, kNumStages, kLeastBytes  of a chunk; chunks that fit the block's memory; of a copy
//   Begin(scratch)                      before the first step
//   Load(scratch, stage, from, bytes)   starts to fill a stage
//   AwaitLoad(scratch, stage, parity)   waits for its last load; parity: of the number before it
//   Store(to, scratch, stage, bytes)    starts to copy a stage out
//   CloseGroup()                        the stores since the last one are a group
//   AwaitRead<n>()                      waits until all groups but the last n have read their
//   stages AwaitStores()                       waits until all stores are done; then this thread
//   sees them
// Addresses and bytes of a step are multiples of 16.
#pragma once

#include <cstdint>

#include "kernels/block.h"
#include "kernels/copy.h"

namespace cpd::kernels {

// Moves rows through registers, with all threads; see copy.h. The path on every GPU.
struct ByRegisters {
  struct Scratch {};

  Scratch* scratch = nullptr;
  int num_threads = 0;  // of the block

  CPD_DEVICE void Begin(const Block&) const {}
  CPD_DEVICE void Copy(const Block& block, const char* from, char* const* to, int num_to,
                       int64_t bytes) const {
    kernels::Copy(block, from, to, num_to, bytes);
  }
  CPD_DEVICE void Finish(const Block&) const {}
};

// Moves rows in bulk, where source and destinations are aligned alike and there are enough bytes;
// the rest through registers.
template <typename Engine>
struct InBulk {
  struct alignas(128) Scratch {
    char stages[Engine::kNumStages][Engine::kChunkBytes];
    uint64_t full[Engine::kNumStages];  // the engine's
    uint32_t num_chunks;                // of this block so far
  };
  static_assert(Engine::kChunkBytes % 16 == 0 && Engine::kNumStages > 1);

  Scratch* scratch;
  int num_threads;  // of the block

  CPD_DEVICE void Begin(const Block& block) const {
    if (block.thread != 0) return;
    scratch->num_chunks = 0;
    Engine::Begin(scratch);
  }

  // With all threads of the block, or, through registers, with some of them. Source and
  // destinations must not change before the block's next Sync.
  CPD_DEVICE void Copy(const Block& block, const char* from, char* const* to, int num_to,
                       int64_t bytes) const {
    const auto address = reinterpret_cast<uint64_t>(from);
    uint64_t apart = 0;
    CPD_NO_UNROLL
    for (int r = 0; r < num_to; ++r) apart |= reinterpret_cast<uint64_t>(to[r]) - address;
    const Cut cut = CutCopy(address, apart, bytes);
    const bool fits = cut.width == 16 && 16 * cut.count >= Engine::kLeastBytes;
    if (!fits || block.num_threads != num_threads) {
      kernels::Copy(block, from, to, num_to, bytes);
      return;
    }
    CopyEach<uint8_t>(block, from, to, num_to, 0, cut.head);
    CopyEach<uint8_t>(block, from, to, num_to, bytes - cut.tail, cut.tail);
    if (block.thread == 0) Pump(from, to, num_to, cut.head, 16 * cut.count);
  }

  // Before the block signals, or ends: its stores are done.
  CPD_DEVICE void Finish(const Block& block) const {
    if (block.thread == 0) Engine::AwaitStores();
  }

 private:
  CPD_DEVICE static int64_t SizeOf(int64_t chunk, int64_t bytes) {
    const int64_t rest = bytes - chunk * Engine::kChunkBytes;
    return rest < Engine::kChunkBytes ? rest : Engine::kChunkBytes;
  }

  // A chunk's stage is free when the chunk kNumStages before it has been stored. While a chunk is
  // stored, those after it are loaded.
  CPD_DEVICE void Pump(const char* from, char* const* to, int num_to, int64_t begin,
                       int64_t bytes) const {
    constexpr int kAhead = Engine::kNumStages - 1;
    const int64_t num = (bytes + Engine::kChunkBytes - 1) / Engine::kChunkBytes;
    const uint32_t first = scratch->num_chunks;
    const auto load = [&](int64_t chunk) {
      const auto stage = static_cast<int>((first + chunk) % Engine::kNumStages);
      Engine::Load(scratch, stage, from + begin + chunk * Engine::kChunkBytes,
                   SizeOf(chunk, bytes));
    };
    Engine::template AwaitRead<0>();
    CPD_NO_UNROLL
    for (int64_t chunk = 0; chunk < kAhead && chunk < num; ++chunk) load(chunk);
    CPD_NO_UNROLL
    for (int64_t chunk = 0; chunk < num; ++chunk) {
      const uint32_t count = first + static_cast<uint32_t>(chunk);
      const auto stage = static_cast<int>(count % Engine::kNumStages);
      Engine::AwaitLoad(scratch, stage, count / Engine::kNumStages % 2);
      CPD_NO_UNROLL
      for (int r = 0; r < num_to; ++r) {
        Engine::Store(to[r] + begin + chunk * Engine::kChunkBytes, scratch, stage,
                      SizeOf(chunk, bytes));
      }
      Engine::CloseGroup();
      if (chunk + kAhead >= num) continue;
      Engine::template AwaitRead<1>();
      load(chunk + kAhead);
    }
    scratch->num_chunks = first + static_cast<uint32_t>(num);
  }
};

// Calls move(path); all that it has moved is there at the end.
template <typename CopyPath, typename Move>
CPD_DEVICE void MoveWith(const Block& block, typename CopyPath::Scratch* scratch, Move move) {
  const CopyPath path{scratch, block.num_threads};
  path.Begin(block);
  move(path);
  path.Finish(block);
}

}  // namespace cpd::kernels
