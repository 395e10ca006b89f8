// Threads for completions and tasks of exchanges, with one for each that may wait for another.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

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

}  // namespace cpd
