// A pool of threads for completions, with a thread for each concurrent completion.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace cpd {

// Completing a rank may run the rest of its program, which may wait for another completion. So a
// task never queues behind a busy thread: there is an idle thread for every queued task, and the
// pool adds threads if there are too few.
class CompletionPool {
 public:
  // A thread ends after it has been idle for `idle_limit`.
  explicit CompletionPool(std::chrono::milliseconds idle_limit = std::chrono::seconds(10));

  void Run(std::function<void()> task);

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
