// Threads that run completions, as many as there are completions at a time.
#include "transport/completion_pool.h"

#include <pthread.h>

#include <system_error>
#include <thread>
#include <utility>

namespace cpd {

void CompletionPool::Run(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
  // Idle threads each take one queued task; only the surplus needs a thread of its own.
  if (num_idle_ >= queue_.size()) {
    wake_.notify_one();
    return;
  }
  try {
    std::thread([this] {
      pthread_setname_np(pthread_self(), "cpd-complete");
      Loop();
    }).detach();
    ++num_threads_;
  } catch (const std::system_error&) {
    // The system has no thread left. A busy one of ours takes the task when it is done; without
    // any, only the caller can.
    if (num_threads_ > 0) return;
    task = std::move(queue_.back());
    queue_.pop_back();
    lock.unlock();
    task();
  }
}

void CompletionPool::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++num_idle_;
    wake_.wait(lock, [this] { return !queue_.empty(); });
    --num_idle_;
    std::function<void()> task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // releases what it holds before sleeping
    lock.lock();
  }
}

}  // namespace cpd
