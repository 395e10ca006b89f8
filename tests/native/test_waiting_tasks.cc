// Tasks of the transport that wait for one another, with a gate and an outcome.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "gemm/plan_overlap.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_waiting_tasks {

using std::chrono::milliseconds;

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

void TasksRunAtTheSameTime(int64_t run_id, int64_t num_tasks) {
  std::atomic<int64_t> num_run{0};
  const Exchange exchange = ExchangeOf(run_id, 3, [&](const auto&, WorkList* work) {
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
  const Exchange exchange = ExchangeOf(200, 3, [](const auto&, WorkList* work) {
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
      ExchangeOf(201, 2, [&num_run, &begin, &held](const auto&, WorkList* work) {
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
  OverlapBufferSpec spec;
  spec.num_ranks = 2;
  spec.rank_bytes = 64;
  CHECK(OverlapBuffers::Get().Create("create", 1, spec).ok());
  std::atomic<int> inside[kGroups] = {};  // 1 + the call that has the group's memory
  std::vector<std::future<Status>> ranks;
  for (int call = 0; call < kCalls; ++call) {
    for (int group = 0; group < kGroups; ++group) {
      Exchange exchange =
          ExchangeOf(300 + call, 2, [&inside, call, group](const auto&, WorkList* work) {
            std::shared_ptr<OverlapBufferLease> lease;
            CHECK(OverlapBuffers::Get().Lease("call", 1, group, true, &lease).ok());
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
  CHECK(OverlapBuffers::Get()
            .Destroy("destroy", 1)
            .ok());  // a rank that has been notified no longer uses it
}

const Register kTests("test_waiting_tasks", [](const Numbers&) {
  TasksRunAtTheSameTime(100, 1);
  TasksRunAtTheSameTime(101, 24);  // more than cores
  TheOutcomeIsThatOfEveryRank();
  TheGateHoldsTheWorkBack();
  CallsOnOneBufferTakeTurns();
});

}  // namespace cpd::test_waiting_tasks
