// The transport between the virtual CPU devices of one process: ranks publish pointers and return,
// the last one to arrive plans and copies, every rank is completed on its own thread.
#include "transport/in_process.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "transport/completion_pool.h"

namespace cpd {
namespace {

using Clock = std::chrono::steady_clock;

struct Rendezvous {
  std::string op;
  std::chrono::milliseconds deadline;
  Clock::time_point expires;
  int num_arrived = 0;
  std::vector<std::unique_ptr<Contribution>> contributions;
  std::vector<Completion> completions;
  std::vector<bool> arrived;
  std::optional<Status> failure;  // set: a tombstone, whoever comes late fails at once

  WorkList work;
  std::atomic<int64_t> next_task{0};
  std::atomic<int64_t> num_open_tasks{0};
};

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

class InProcess final : public Transport {
 public:
  InProcess() {
    std::thread([this] {
      pthread_setname_np(pthread_self(), "cpd-watchdog");
      Watch();
    }).detach();
  }

  void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
            Completion completion, int num_helpers, const Scheduler& scheduler) override {
    std::shared_ptr<Rendezvous> meeting;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      meeting = FindOrOpen(exchange);
      if (meeting->failure) {
        const Status failure = *meeting->failure;
        if (++meeting->num_arrived >= exchange.num_ranks) meetings_.erase(exchange.key);
        lock.unlock();
        completion(failure);
        return;
      }
      if (rank < 0 || rank >= exchange.num_ranks || meeting->arrived[rank]) {
        std::ostringstream message;
        message << exchange.op << ": rank " << rank << " arrived "
                << (rank < 0 || rank >= exchange.num_ranks ? "but ranks are" : "twice; ranks are")
                << " 0.." << exchange.num_ranks - 1
                << ". Every other mesh axis must be manual where this is called, so that each of "
                   "its groups is told apart.";
        auto waiting = Fail(*meeting, {StatusCode::kInternal, message.str()});
        ++meeting->num_arrived;
        waiting.push_back(std::move(completion));
        const Status failure = *meeting->failure;
        lock.unlock();
        CompleteEach(std::move(waiting), failure);
        return;
      }
      meeting->arrived[rank] = true;
      meeting->contributions[rank] = std::move(contribution);
      meeting->completions[rank] = std::move(completion);
      if (++meeting->num_arrived < exchange.num_ranks) return;
      // Erased before the work starts: the next round of a loop opens a new meeting.
      meetings_.erase(exchange.key);
    }

    const Status planned = exchange.planner(meeting->contributions, &meeting->work);
    const int64_t num_tasks = planned.ok() ? meeting->work.num_tasks : 0;
    if (num_tasks == 0) {
      CompleteAll(*meeting, planned, rank);
      return;
    }
    meeting->num_open_tasks = num_tasks;
    for (int64_t i = 0; i < std::min<int64_t>(num_helpers, num_tasks - 1); ++i) {
      scheduler([this, meeting] { Work(*meeting, /*self=*/-1); });
    }
    Work(*meeting, rank);
  }

 private:
  std::shared_ptr<Rendezvous> FindOrOpen(const Exchange& exchange) {
    std::shared_ptr<Rendezvous>& slot = meetings_[exchange.key];
    if (!slot) {
      slot = std::make_shared<Rendezvous>();
      slot->op = exchange.op;
      slot->deadline = exchange.deadline;
      slot->expires = Clock::now() + exchange.deadline;
      slot->contributions.resize(exchange.num_ranks);
      slot->completions.resize(exchange.num_ranks);
      slot->arrived.resize(exchange.num_ranks, false);
      if (slot->expires < next_wake_) {
        next_wake_ = slot->expires;
        wake_.notify_one();
      }
    }
    return slot;
  }

  // Turns the meeting into a tombstone that stands for another deadline; the ranks that waited are
  // handed back to be told. Called with the lock held.
  static std::vector<Completion> Fail(Rendezvous& meeting, Status status) {
    meeting.failure = std::move(status);
    meeting.expires = Clock::now() + meeting.deadline;
    std::vector<Completion> waiting;
    for (Completion& completion : meeting.completions) {
      if (completion) waiting.push_back(std::exchange(completion, nullptr));
    }
    return waiting;
  }

  void CompleteEach(std::vector<Completion> completions, const Status& status) {
    for (Completion& completion : completions) {
      pool_.Run([completion = std::move(completion), status] { completion(status); });
    }
  }

  // A completion runs the rest of a rank's program, which may wait for another rank's: each on its
  // own thread, and the caller's own rank (if any) last, inline.
  void CompleteAll(Rendezvous& meeting, const Status& status, int self) {
    Completion own;
    if (self >= 0) own = std::exchange(meeting.completions[self], nullptr);
    std::vector<Completion> others;
    for (Completion& completion : meeting.completions) {
      if (completion) others.push_back(std::exchange(completion, nullptr));
    }
    CompleteEach(std::move(others), status);
    if (own) own(status);
  }

  void Work(Rendezvous& meeting, int self) {
    int64_t num_done = 0;
    for (int64_t task; (task = meeting.next_task.fetch_add(1)) < meeting.work.num_tasks;) {
      meeting.work.run(task);
      ++num_done;
    }
    // Whoever closes the last task sees every other thread's copies (acquire-release).
    if (num_done > 0 && meeting.num_open_tasks.fetch_sub(num_done) == num_done) {
      CompleteAll(meeting, Status::Ok(), self);
    }
  }

  void Watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const Clock::time_point now = Clock::now();
      next_wake_ = now + std::chrono::hours(1);
      std::vector<std::pair<std::vector<Completion>, Status>> expired;
      for (auto it = meetings_.begin(); it != meetings_.end();) {
        Rendezvous& meeting = *it->second;
        if (meeting.expires <= now && meeting.failure) {
          it = meetings_.erase(it);
          continue;
        }
        if (meeting.expires <= now) {
          std::ostringstream message;
          message
              << meeting.op << ": deadline of " << meeting.deadline.count()
              << " ms passed: " << meeting.num_arrived << "/" << meeting.arrived.size()
              << " ranks arrived, ranks " << RankList(meeting.arrived, true)
              << " wait for missing ranks " << RankList(meeting.arrived, false)
              << ". Every rank of the axis must make this call the same number of times; see "
                 "whether a missing rank raised an error of its own, or pass a longer deadline.";
          Status status{StatusCode::kDeadlineExceeded, message.str()};
          expired.emplace_back(Fail(meeting, status), status);
        }
        next_wake_ = std::min(next_wake_, meeting.expires);
        ++it;
      }
      lock.unlock();
      for (auto& [completions, status] : expired) CompleteEach(std::move(completions), status);
      lock.lock();
      if (Clock::now() < next_wake_) wake_.wait_until(lock, next_wake_);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Clock::time_point next_wake_ = Clock::now();
  std::map<ExchangeKey, std::shared_ptr<Rendezvous>> meetings_;
  CompletionPool pool_;
};

}  // namespace

Transport& InProcessTransport() {
  static auto* transport = new InProcess;
  return *transport;
}

}  // namespace cpd
