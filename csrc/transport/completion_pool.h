// Threads that run completions, as many as there are completions at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace cpd {

// Completing one rank may run the rest of its program, which may wait for what another completion
// starts. A task therefore never queues behind a busy thread: if none is idle, a thread is added.
class CompletionPool {
 public:
  void Run(std::function<void()> task);

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t num_idle_ = 0;
  size_t num_threads_ = 0;
};

}  // namespace cpd
