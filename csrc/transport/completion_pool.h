// Threads for completions and tasks of exchanges, with one for each that may wait for another.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// Tasks that any thread may run. Late threads find none left.
class Tasks {
 public:
  // Before any thread works.
  void Open(int64_t num_tasks) { num_tasks_ = num_open_ = num_tasks; }

  // Runs tasks until none is left. Returns whether the last of all has ended here: this thread then
  // sees the copies of all others (acquire-release).
  bool Work(const std::function<void(int64_t task)>& run) {
    int64_t num_done = 0;
    for (int64_t task; (task = next_.fetch_add(1)) < num_tasks_;) {
      run(task);
      ++num_done;
    }
    return num_done > 0 && num_open_.fetch_sub(num_done) == num_done;
  }

 private:
  int64_t num_tasks_ = 0;
  std::atomic<int64_t> next_{0}, num_open_{0};
};

// Completing a rank may run the rest of its program, which may wait for another completion. So a
// task never queues behind a busy thread: there is an idle thread for every queued task, and the
// pool adds threads if there are too few.
class CompletionPool {
 public:
  // A thread ends after it has been idle for `idle_limit`.
  explicit CompletionPool(std::chrono::milliseconds idle_limit = std::chrono::seconds(10));

  void Run(std::function<void()> task);

  // Runs tasks that wait for one another at the same time, and `then` after the last.
  void RunAtOnce(int64_t num_tasks, std::function<void(int64_t task)> run,
                 std::function<void()> then);

  size_t num_threads();

 private:
  void Loop();
  std::function<void()> NextTask();
  std::function<void()> Pop();

  const std::chrono::milliseconds idle_limit_;
  const size_t max_spinning_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  std::atomic<size_t> num_queued_{0};  // read without the lock
  // Idle threads, including those about to take a task: each looks at the queue before it ends.
  size_t num_spinning_ = 0;
  size_t num_sleeping_ = 0;
  size_t num_threads_ = 0;
};

// ---- Failed executions, and how their ranks are notified; common to the transports.

// Records of failed executions: a rank that arrives later fails at once.
class FailedRuns {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns when the record expires: after a deadline, when no late rank is expected any more.
  Clock::time_point Add(int64_t run_id, const Status& status, std::chrono::milliseconds deadline);
  const Status* Find(int64_t run_id) const;  // nullptr: it has not failed
  // Returns when the next record expires.
  Clock::time_point Forget(Clock::time_point now);

 private:
  struct Failure {
    Status status;
    Clock::time_point forgotten;
  };
  std::map<int64_t, Failure> runs_;
};

// A completion runs the rest of a rank's program, which may wait for another rank's, so each runs
// on its own thread. Failures are reported with a short delay: XLA then abandons the rest of the
// rank's program, including a collective that does not depend on this package. Other ranks may
// already wait in that collective, and would wait for ever. The delay lets the rank reach what is
// ready.
void CompleteEach(CompletionPool& pool, std::vector<Completion> completions, const Status& status);

// Of one rank.
std::vector<Completion> Only(Completion completion);

// "[0, 3]": the ranks for which `arrived` equals `wanted`.
std::string RankList(const std::vector<bool>& arrived, bool wanted);

}  // namespace cpd
