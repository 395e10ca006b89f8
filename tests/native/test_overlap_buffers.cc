// The registry of communication buffers, and tasks that wait for one another, with a gate and an
// outcome, through the transport.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "gemm/overlap_buffers.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_overlap_buffers {

using std::chrono::milliseconds;

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

// ---- The description under an id.

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

// ---- Tasks that wait for one another.

// A barrier for `count` threads.
class Barrier {
 public:
  explicit Barrier(int64_t count) : num_missing_(count) {}
  bool Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--num_missing_ == 0) all_.notify_all();
    return all_.wait_for(lock, std::chrono::seconds(20), [this] { return num_missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int64_t num_missing_;
};

Exchange MakeExchange(int64_t run_id, int num_ranks, Planner planner) {
  return {"test", {run_id, 1, 0}, num_ranks, milliseconds(20000), std::move(planner)};
}

std::vector<std::future<Status>> JoinAll(const Exchange& exchange) {
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < exchange.num_ranks; ++rank) ranks.push_back(Join(exchange, rank));
  return ranks;
}

void PiecesRunAtTheSameTime(int64_t run_id, int64_t num_tasks) {
  std::atomic<int64_t> num_run{0};
  const Exchange exchange = MakeExchange(run_id, 3, [&](const auto&, WorkList* work) {
    auto barrier = std::make_shared<Barrier>(num_tasks);
    work->num_tasks = num_tasks;
    work->tasks_wait = true;
    work->run = [&num_run, barrier](int64_t) {
      CHECK(barrier->Wait());
      ++num_run;
    };
    return Status::Ok();
  });
  for (int round = 1; round <= 10; ++round) {
    for (auto& status : JoinAll(exchange)) CHECK(status.get().ok());
    CHECK(num_run == round * num_tasks);
  }
}

// The ranks of the call, those that wait elsewhere in the execution, and later ones.
void TheOutcomeIsThatOfEveryRank() {
  const Exchange exchange = MakeExchange(200, 3, [](const auto&, WorkList* work) {
    work->num_tasks = 4;
    work->tasks_wait = true;
    work->run = [](int64_t) {};
    work->outcome = [] { return Status{StatusCode::kInternal, "out of paper"}; };
    return Status::Ok();
  });
  Exchange other = exchange;
  other.key.call_site = 2;
  auto waiting = Join(other, 0);
  for (auto& status : JoinAll(exchange)) {
    const Status result = status.get();
    CHECK(result.code == StatusCode::kInternal && result.message == "out of paper");
  }
  CHECK(Contains(waiting.get(), "out of paper"));
  CHECK(Contains(Join(other, 1).get(), "out of paper"));
}

void TheGateHoldsTheWorkBack() {
  std::atomic<int> num_run{0};
  std::function<void()> begin;
  auto held = std::make_shared<int>(0);  // by the work
  const Exchange exchange =
      MakeExchange(201, 2, [&num_run, &begin, &held](const auto&, WorkList* work) {
        work->num_tasks = 2;
        work->tasks_wait = true;
        work->run = [&num_run, held](int64_t) { ++num_run; };
        work->gate = [&begin](std::function<void()> open) { begin = std::move(open); };
        return Status::Ok();
      });
  auto ranks = JoinAll(exchange);
  CHECK(ranks[0].wait_for(milliseconds(50)) == std::future_status::timeout);
  CHECK(begin && num_run == 0);
  std::thread(std::move(begin)).join();
  for (auto& status : ranks) CHECK(status.get().ok());
  CHECK(num_run == 2);
  CHECK(held.use_count() == 1);  // releases what it holds before any rank is notified
}

// As for calls on one buffer: the lease is the gate, and its end lets the next call begin.
void CallsOnOneBufferTakeTurns() {
  static constexpr int kCalls = 6, kGroups = 2, kTasks = 4;
  CHECK(Registry().Create("create", 1, Spec("a")).ok());
  std::atomic<int> inside[kGroups] = {};  // 1 + the call that has the group's memory
  std::vector<std::future<Status>> ranks;
  for (int call = 0; call < kCalls; ++call) {
    for (int group = 0; group < kGroups; ++group) {
      Exchange exchange =
          MakeExchange(300 + call, 2, [&inside, call, group](const auto&, WorkList* work) {
            auto lease = Lease(1, group);
            auto barrier = std::make_shared<Barrier>(kTasks);
            work->num_tasks = kTasks;
            work->tasks_wait = true;
            work->run = [&inside, call, group, lease, barrier](int64_t) {
              int nobody = 0;
              CHECK(inside[group].compare_exchange_strong(nobody, call + 1) || nobody == call + 1);
              std::this_thread::sleep_for(milliseconds(2));
              CHECK(inside[group] == call + 1);
              CHECK(barrier->Wait());
            };
            work->outcome = [&inside, group, lease] {
              std::memset(lease->memory(0), 1, 64);  // unless they take turns, this is a race
              inside[group] = 0;
              return Status::Ok();
            };
            work->gate = [lease](std::function<void()> begin) { lease->Enter(std::move(begin)); };
            return Status::Ok();
          });
      exchange.key.group = group;
      for (auto& status : JoinAll(exchange)) ranks.push_back(std::move(status));
    }
  }
  for (auto& status : ranks) CHECK(status.get().ok());
  CHECK(Registry().Destroy("destroy", 1).ok());  // a rank that has been notified no longer uses it
}

const Register kTests("test_overlap_buffers", [](const Numbers&) {
  DestroyedAsOftenAsCreated();
  ABufferInUseStays();
  CallsOfAGroupShareItsMemory();
  if (kCanRunOutOfMemory) NoMemoryIsAnError();
  CallsOfAGroupTakeTurns();
  ThreadsUseTheRegistryAtOnce();
  PiecesRunAtTheSameTime(100, 1);
  PiecesRunAtTheSameTime(101, 24);  // more than cores
  TheOutcomeIsThatOfEveryRank();
  TheGateHoldsTheWorkBack();
  CallsOnOneBufferTakeTurns();
});

}  // namespace cpd::test_overlap_buffers
