// Threads for completions and tasks of exchanges, with one for each that may wait for another.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
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
  using Clock = std::chrono::steady_clock;

  // A thread ends after it has been idle for `idle_limit`. Leaves one core to the thread that
  // brings the next task.
  explicit CompletionPool(std::chrono::milliseconds idle_limit = std::chrono::seconds(10))
      : idle_limit_(idle_limit),
        max_spinning_(std::max(1u, std::thread::hardware_concurrency()) - 1) {}

  void Run(std::function<void()> task) {
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
      // The system has no more threads. A busy thread of the pool takes the task when it finishes;
      // if there is none, only the caller can run it.
      if (num_threads_ > 0) return;
      task = Pop();
      lock.unlock();
      task();
    }
  }

  // Runs tasks that wait for one another at the same time, and `then` after the last.
  void RunAtOnce(int64_t num_tasks, std::function<void(int64_t)> run, std::function<void()> then) {
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

  size_t num_threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_threads_;
  }

 private:
  // Waking a thread takes longer than an exchange of small arrays. In a loop the next task comes
  // within this time, and a thread that is still awake takes it at once. Meanwhile it yields to
  // other threads.
  static constexpr std::chrono::microseconds kSpinTime{50};

  void Loop() {
    while (std::function<void()> task = NextTask()) task();
  }

  // Returns an empty function if the thread should end.
  std::function<void()> NextTask() {
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
  std::function<void()> Pop() {
    std::function<void()> task = std::move(queue_.front());
    queue_.pop_front();
    num_queued_ = queue_.size();
    return task;
  }

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
  Clock::time_point Add(int64_t run_id, const Status& status, std::chrono::milliseconds deadline) {
    const Clock::time_point forgotten =
        Clock::now() + std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(1));
    runs_[run_id] = {status, forgotten};
    return forgotten;
  }

  // nullptr: it has not failed
  const Status* Find(int64_t run_id) const {
    const auto found = runs_.find(run_id);
    return found == runs_.end() ? nullptr : &found->second.status;
  }

  // Returns when the next record expires.
  Clock::time_point Forget(Clock::time_point now) {
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
inline void CompleteEach(CompletionPool& pool, std::vector<Completion> completions,
                         const Status& status) {
  constexpr std::chrono::milliseconds kGrace{100};
  for (Completion& completion : completions) {
    pool.Run([completion = std::move(completion), status, kGrace] {
      if (!status.ok()) std::this_thread::sleep_for(kGrace);
      completion(status);
    });
  }
}

// Of one rank.
inline std::vector<Completion> Only(Completion completion) {
  std::vector<Completion> completions;
  completions.push_back(std::move(completion));
  return completions;
}

// "[0, 3]": the ranks for which `arrived` equals `wanted`.
inline std::string RankList(const std::vector<bool>& arrived, bool wanted) {
  std::string text;
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank] == wanted) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "[" + text + "]";
}

}  // namespace cpd
