// The registry of communication buffers: ids, descriptions, memory, and calls that take turns.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "gemm/plan_overlap.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_overlap_buffers {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kCanRunOutOfMemory = false;  // a sanitizer aborts the process instead
#else
constexpr bool kCanRunOutOfMemory = true;
#endif

OverlapBuffers& Registry() { return OverlapBuffers::Get(); }

OverlapBufferSpec Spec(const char* parameters, int64_t rank_bytes = 64) {
  OverlapBufferSpec spec;
  spec.num_ranks = 2;
  spec.rank_bytes = rank_bytes;
  spec.parameters = parameters;
  return spec;
}

std::shared_ptr<OverlapBufferLease> Lease(int64_t id, int64_t group = 0) {
  std::shared_ptr<OverlapBufferLease> lease;
  CHECK(Registry().Lease("call", id, group, true, &lease).ok());
  return lease;
}

void DestroyedAsOftenAsCreated() {
  CHECK(Contains(Registry().Destroy("destroy", 1), "destroy: there is no buffer 1. Create it"));
  CHECK(Registry().Create("create", 1, Spec("a")).ok());
  CHECK(Registry().Create("create", 1, Spec("a")).ok());
  CHECK(Contains(Registry().Create("create", 1, Spec("b")),
                 "create: id 1 already denotes (a), not (b)"));
  CHECK(Registry().List().size() == 1 && Registry().List()[0].second.num_created == 2);
  CHECK(Registry().Destroy("destroy", 1).ok());
  OverlapBufferEntry entry;
  CHECK(Registry().Find("find", 1, &entry).ok() && entry.spec.parameters == "a");
  CHECK(Registry().Destroy("destroy", 1).ok());
  CHECK(Contains(Registry().Destroy("destroy", 1), "destroy: buffer 1 has been destroyed."));
  CHECK(Contains(Registry().Find("find", 1, &entry), "find: buffer 1 has been destroyed."));
  std::shared_ptr<OverlapBufferLease> lease;
  CHECK(
      Contains(Registry().Lease("call", 1, 0, true, &lease), "call: buffer 1 has been destroyed."));
  CHECK(Contains(Registry().Lease("call", 2, 0, true, &lease), "call: there is no buffer 2."));
  CHECK(!lease);
  CHECK(Registry().Create("create", 1, Spec("b")).ok());  // the id is free for something else
  CHECK(Registry().DestroyAll("destroy").ok());
  CHECK(Registry().List().empty());
  CHECK(Contains(Registry().Destroy("destroy", 1), "has been destroyed"));
}

void ABufferInUseStays() {
  for (const int64_t id : {1, 2, 3}) CHECK(Registry().Create("create", id, Spec("a")).ok());
  CHECK(Registry().Create("create", 2, Spec("a")).ok());
  auto first = Lease(2), second = Lease(2, 5), other = Lease(3);
  CHECK(Registry().Destroy("destroy", 1).ok());
  CHECK(Registry().Destroy("destroy", 2).ok());  // it was created twice
  CHECK(Contains(Registry().Destroy("destroy", 2), "buffer 2 is in use by 2 calls in flight"));
  CHECK(Contains(Registry().DestroyAll("destroy"), "use buffers 2 (2 calls), 3 (1 call); none"));
  first.reset();
  CHECK(Contains(Registry().Destroy("destroy", 2), "buffer 2 is in use by 1 call in flight"));
  const auto entries = Registry().List();
  CHECK(entries.size() == 2 && entries[0].first == 2);
  const OverlapBufferEntry& entry = entries[0].second;
  CHECK(entry.num_created == 1 && entry.num_in_use == 1 && entry.num_calls == 2 &&
        entry.num_groups == 2);
  second.reset();
  CHECK(Registry().Destroy("destroy", 2).ok());
  CHECK(!Registry().DestroyAll("destroy").ok());
  other.reset();
  CHECK(Registry().DestroyAll("destroy").ok());
}

// Each group and rank has its own memory, the same in every call.
void CallsOfAGroupShareItsMemory() {
  CHECK(Registry().Create("create", 1, Spec("a")).ok());
  std::vector<char*> all;
  for (const int64_t group : {0, 1}) {
    const auto lease = Lease(1, group), again = Lease(1, group);
    for (const int rank : {0, 1}) {
      CHECK(lease->memory(rank) == again->memory(rank));
      std::memset(lease->memory(rank), rank, 64);
      all.push_back(lease->memory(rank));
    }
  }
  std::sort(all.begin(), all.end());
  for (int i = 0; i < 3; ++i) CHECK(all[i + 1] - all[i] >= 64);
  CHECK(Registry().Destroy("destroy", 1).ok());
}

void NoMemoryIsAnError() {
  CHECK(Registry().Create("create", 1, Spec("a", int64_t{1} << 60)).ok());
  std::shared_ptr<OverlapBufferLease> lease;
  CHECK(Contains(Registry().Lease("call", 1, 0, true, &lease),
                 "call: no memory for buffer 1: 2 ranks"));
  CHECK(!lease && Registry().List()[0].second.num_in_use == 0);
  CHECK(Registry().Destroy("destroy", 1).ok());
}

void CallsOfAGroupTakeTurns() {
  CHECK(Registry().Create("create", 1, Spec("a")).ok());
  std::string begun;
  const auto enter = [&](const std::shared_ptr<OverlapBufferLease>& lease, char name) {
    lease->Enter([&begun, name] { begun += name; });
  };
  auto a = Lease(1), b = Lease(1), c = Lease(1), never = Lease(1), other = Lease(1, 9);
  enter(b, 'b');  // in the order in which they enter, not in that of the leases
  enter(a, 'a');
  enter(c, 'c');
  CHECK(begun == "b");
  enter(other, 'o');
  CHECK(begun == "bo");
  never.reset();  // a call that failed before it began takes no turn
  other.reset();
  CHECK(begun == "bo");
  b.reset();
  CHECK(begun == "boa");
  a.reset();
  CHECK(begun == "boac");
  c.reset();
  auto next = Lease(1);
  enter(next, 'n');
  CHECK(begun == "boacn");
  next.reset();
  CHECK(Registry().Destroy("destroy", 1).ok());
}

void ThreadsUseTheRegistryAtOnce() {
  constexpr int kThreads = 8, kIds = 3;
  std::atomic<int> num_inside[kIds] = {}, num_begun{0}, num_entered{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 rng(thread);
      for (int round = 0; round < 200; ++round) {
        const int64_t id = rng() % kIds;
        CHECK(Registry().Create("create", id, Spec("a")).ok());
        auto lease = Lease(id);  // not destroyed: this thread has created it
        auto* held = new std::shared_ptr<OverlapBufferLease>(lease);
        ++num_entered;
        lease->Enter([&, held, id] {
          CHECK(++num_inside[id] == 1);
          std::memset((*held)->memory(0), 1, 64);
          --num_inside[id];
          ++num_begun;
          delete held;  // the end of the call
        });
        lease.reset();
        Registry().List();
        const Status status = Registry().Destroy("destroy", id);
        CHECK(status.ok() || Contains(status, "in flight"));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_begun == num_entered);
  CHECK(Registry().DestroyAll("destroy").ok());
}

const Register kTests("test_overlap_buffers", [](const Numbers&) {
  DestroyedAsOftenAsCreated();
  ABufferInUseStays();
  CallsOfAGroupShareItsMemory();
  if (kCanRunOutOfMemory) NoMemoryIsAnError();
  CallsOfAGroupTakeTurns();
  ThreadsUseTheRegistryAtOnce();
});

}  // namespace cpd::test_overlap_buffers
