// Threads that run completions, as many as there are completions at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace cpd {

// Completing one rank may run the rest of its program, which may wait for what another completion
// starts. A task therefore never queues behind a busy thread: for every queued task there is an
// idle thread, and if there are not enough, one is added.
class CompletionPool {
 public:
  // A thread that had nothing to do for `idle_limit` ends.
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
  std::atomic<size_t> num_queued_{0};  // for threads that look without the lock
  // Idle threads, also those on their way to a task: each looks at the queue before it ends.
  size_t num_spinning_ = 0;
  size_t num_sleeping_ = 0;
  size_t num_threads_ = 0;
};

}  // namespace cpd
