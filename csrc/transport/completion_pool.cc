// Threads for completions and tasks of exchanges, with one for each that may wait for another.
#include "transport/completion_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace cpd {
namespace {

using Clock = std::chrono::steady_clock;

// Waking a thread takes longer than an exchange of small arrays. In a loop the next task comes
// within this time, and a thread that is still awake takes it at once. Meanwhile it yields to other
// threads.
constexpr std::chrono::microseconds kSpinTime{50};

}  // namespace

// Leaves one core to the thread that brings the next task.
CompletionPool::CompletionPool(std::chrono::milliseconds idle_limit)
    : idle_limit_(idle_limit),
      max_spinning_(std::max(1u, std::thread::hardware_concurrency()) - 1) {}

size_t CompletionPool::num_threads() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_threads_;
}

void CompletionPool::Run(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
  num_queued_ = queue_.size();
  if (queue_.size() <= num_spinning_) return;
  if (queue_.size() <= num_spinning_ + num_sleeping_) {
    lock.unlock();  // first: otherwise the thread wakes only to wait for the lock
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
    // The system has no more threads. A busy thread of the pool takes the task when it finishes; if
    // there is none, only the caller can run it.
    if (num_threads_ > 0) return;
    task = Pop();
    lock.unlock();
    task();
  }
}

void CompletionPool::RunAtOnce(int64_t num_tasks, std::function<void(int64_t)> run,
                               std::function<void()> then) {
  if (num_tasks == 0) return then();
  struct Shared {
    std::function<void(int64_t)> run;
    std::function<void()> then;
    std::atomic<int64_t> num_open;
  };
  const std::shared_ptr<Shared> shared(new Shared{std::move(run), std::move(then), {num_tasks}});
  for (int64_t task = 0; task < num_tasks; ++task) {
    Run([shared, task] {
      shared->run(task);
      if (shared->num_open.fetch_sub(1) == 1) shared->then();
    });
  }
}

void CompletionPool::Loop() {
  while (std::function<void()> task = NextTask()) task();
}

// Returns an empty function if the thread should end.
std::function<void()> CompletionPool::NextTask() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (queue_.empty() && num_spinning_ < max_spinning_) {
    ++num_spinning_;
    lock.unlock();
    const Clock::time_point end = Clock::now() + kSpinTime;
    while (num_queued_.load(std::memory_order_relaxed) == 0 && Clock::now() < end) sched_yield();
    lock.lock();
    --num_spinning_;
  }
  if (queue_.empty()) {
    ++num_sleeping_;
    wake_.wait_for(lock, idle_limit_, [this] { return !queue_.empty(); });
    --num_sleeping_;
  }
  if (!queue_.empty()) return Pop();
  --num_threads_;
  return nullptr;
}

// Called with the lock held and a non-empty queue.
std::function<void()> CompletionPool::Pop() {
  std::function<void()> task = std::move(queue_.front());
  queue_.pop_front();
  num_queued_ = queue_.size();
  return task;
}

}  // namespace cpd
