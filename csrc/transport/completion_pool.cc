// Threads for completions and tasks of exchanges, with one for each that may wait for another.
#include "transport/completion_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <sstream>
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

// ---- Failed executions, and how their ranks are notified; common to the transports.

namespace {

// Delay between a failure and the notification of its ranks.
constexpr std::chrono::milliseconds kGrace{100};

}  // namespace

FailedRuns::Clock::time_point FailedRuns::Add(int64_t run_id, const Status& status,
                                              std::chrono::milliseconds deadline) {
  const Clock::time_point forgotten =
      Clock::now() + std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(1));
  runs_[run_id] = {status, forgotten};
  return forgotten;
}

const Status* FailedRuns::Find(int64_t run_id) const {
  const auto found = runs_.find(run_id);
  return found == runs_.end() ? nullptr : &found->second.status;
}

FailedRuns::Clock::time_point FailedRuns::Forget(Clock::time_point now) {
  Clock::time_point next = now + std::chrono::hours(1);
  for (auto it = runs_.begin(); it != runs_.end();) {
    if (it->second.forgotten <= now) {
      it = runs_.erase(it);
    } else {
      next = std::min(next, it->second.forgotten);
      ++it;
    }
  }
  return next;
}

void CompleteEach(CompletionPool& pool, std::vector<Completion> completions, const Status& status) {
  for (Completion& completion : completions) {
    pool.Run([completion = std::move(completion), status] {
      if (!status.ok()) std::this_thread::sleep_for(kGrace);
      completion(status);
    });
  }
}

std::vector<Completion> Only(Completion completion) {
  std::vector<Completion> completions;
  completions.push_back(std::move(completion));
  return completions;
}

std::string RankList(const std::vector<bool>& arrived, bool wanted) {
  std::ostringstream out;
  const char* separator = "[";
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank] != wanted) continue;
    out << separator << rank;
    separator = ", ";
  }
  out << "]";
  return out.str();
}

}  // namespace cpd
