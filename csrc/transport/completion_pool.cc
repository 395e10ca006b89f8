// Threads that run completions, as many as there are completions at a time.
#include "transport/completion_pool.h"

#include <pthread.h>

#include <thread>
#include <utility>

namespace cpd {

void CompletionPool::Run(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
  // Idle threads each take one queued task; only the surplus needs a thread of its own.
  if (num_idle_ >= queue_.size()) {
    wake_.notify_one();
    return;
  }
  std::thread([this] {
    pthread_setname_np(pthread_self(), "cpd-complete");
    Loop();
  }).detach();
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
