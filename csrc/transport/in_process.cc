// The transport between the virtual CPU devices of one process. Ranks publish pointers and return;
// the last to arrive plans and copies; every rank completes on its own thread.
#include "transport/in_process.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
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

  WorkList work;
  Tasks tasks;
};

using Meetings = std::map<ExchangeKey, std::shared_ptr<Rendezvous>>;

// Where the ranks that `meeting` misses wait instead: in another operation, or in another order.
std::string WaitElsewhere(const Meetings& meetings, const ExchangeKey& key,
                          const Rendezvous& meeting) {
  std::ostringstream out;
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  for (auto it = meetings.lower_bound({key.run_id, kLowest, kLowest});
       it != meetings.end() && it->first.run_id == key.run_id; ++it) {
    const Rendezvous& other = *it->second;
    if (it->first.call_site == key.call_site || it->first.group != key.group ||
        other.arrived.size() != meeting.arrived.size()) {
      continue;
    }
    for (size_t rank = 0; rank < other.arrived.size(); ++rank) {
      if (meeting.arrived[rank] || !other.arrived[rank]) continue;
      out << " Rank " << rank << " waits in another call: " << other.op << ".";
    }
  }
  return out.str();
}

std::string MissingRanks(const Meetings& meetings, const ExchangeKey& key,
                         const Rendezvous& meeting) {
  std::ostringstream message;
  message << meeting.op << ": deadline of " << meeting.deadline.count()
          << " ms passed: " << meeting.num_arrived << "/" << meeting.arrived.size()
          << " ranks arrived, ranks " << RankList(meeting.arrived, true)
          << " wait for missing ranks " << RankList(meeting.arrived, false) << "."
          << WaitElsewhere(meetings, key, meeting)
          << " Every rank of the axis must make this call the same number of times; check whether "
             "a missing rank raised its own error, or pass a longer deadline.";
  return message.str();
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
      if (const Status* failed = failed_runs_.Find(exchange.key.run_id)) {
        const Status failure = *failed;
        lock.unlock();
        CompleteEach(pool_, Only(std::move(completion)), failure);
        return;
      }
      meeting = FindOrOpen(exchange);
      if (rank < 0 || rank >= exchange.num_ranks || meeting->arrived[rank]) {
        const Status failure = Status::Internal(
            exchange.op, ": rank ", rank, " arrived ",
            rank < 0 || rank >= exchange.num_ranks ? "but ranks are" : "twice; ranks are", " 0..",
            exchange.num_ranks - 1,
            ". Every other mesh axis must be manual where this is called, so that its groups can "
            "be distinguished.");
        FailAll(std::move(lock), exchange.key.run_id, failure, exchange.deadline,
                Only(std::move(completion)));
        return;
      }
      meeting->arrived[rank] = true;
      meeting->contributions[rank] = std::move(contribution);
      meeting->completions[rank] = std::move(completion);
      if (++meeting->num_arrived < exchange.num_ranks) return;
      // Erased before the work starts: the next round of a loop opens a new meeting.
      meetings_.erase(exchange.key);
    }

    const Status planned = Plan(exchange, *meeting);
    if (!planned.ok()) {
      FailAll(std::unique_lock<std::mutex>(mutex_), exchange.key.run_id, planned, exchange.deadline,
              std::move(meeting->completions));
      return;
    }
    const int64_t num_tasks = meeting->work.num_tasks;
    if (num_tasks == 0) {
      CompleteAll(*meeting, rank);
      return;
    }
    if (meeting->work.tasks_wait) {
      RunWhenOpen(exchange.key.run_id, meeting);
      return;
    }
    meeting->tasks.Open(num_tasks);
    try {
      for (int64_t i = 0; i < std::min<int64_t>(num_helpers, num_tasks - 1); ++i) {
        scheduler([this, meeting] { Work(*meeting, /*self=*/-1); });
      }
    } catch (const std::exception&) {  // continue with fewer helpers
    }
    Work(*meeting, rank);
  }

  void Fail(int64_t run_id, const Status& status, std::chrono::milliseconds deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    auto waiting = FailRun(run_id, status, deadline);
    lock.unlock();
    CompleteEach(pool_, std::move(waiting), status);
  }

  void Refuse(const Exchange& exchange, const Status& status, Completion completion) override {
    FailAll(std::unique_lock<std::mutex>(mutex_), exchange.key.run_id, status, exchange.deadline,
            Only(std::move(completion)));
  }

  void TellFailures(FailureListener listener) {
    std::lock_guard<std::mutex> lock(mutex_);
    listener_ = std::move(listener);
  }

 private:
  std::shared_ptr<Rendezvous> FindOrOpen(const Exchange& exchange) {
    const auto found = meetings_.find(exchange.key);
    if (found != meetings_.end()) return found->second;
    auto meeting = std::make_shared<Rendezvous>();
    meeting->op = exchange.op;
    meeting->deadline = exchange.deadline;
    meeting->expires = Clock::now() + exchange.deadline;
    meeting->contributions.resize(exchange.num_ranks);
    meeting->completions.resize(exchange.num_ranks);
    meeting->arrived.resize(exchange.num_ranks, false);
    meetings_.emplace(exchange.key, meeting);
    WakeBy(meeting->expires);
    return meeting;
  }

  // Makes the watchdog look again by then. Called with the lock held.
  void WakeBy(Clock::time_point time) {
    if (time >= next_wake_) return;
    next_wake_ = time;
    wake_.notify_one();
  }

  // A planner that throws (no memory for a plan with very many pieces) also fails every rank.
  static Status Plan(const Exchange& exchange, Rendezvous& meeting) {
    try {
      return exchange.planner(meeting.contributions, &meeting.work);
    } catch (const std::exception& error) {
      return Status::Internal(exchange.op, ": planning the copies failed: ", error.what());
    }
  }

  // One failed exchange fails the whole execution. Ranks that continued alone could reach an XLA
  // collective, which waits for the failed ranks and then aborts the process. Returns the ranks
  // that wait anywhere in this execution, for the caller to notify. Called with the lock held.
  std::vector<Completion> FailRun(int64_t run_id, const Status& status,
                                  std::chrono::milliseconds deadline) {
    WakeBy(failed_runs_.Add(run_id, status, deadline));
    std::vector<Completion> waiting;
    constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
    auto it = meetings_.lower_bound({run_id, kLowest, kLowest});
    for (; it != meetings_.end() && it->first.run_id == run_id; it = meetings_.erase(it)) {
      for (Completion& completion : it->second->completions) {
        if (completion) waiting.push_back(std::exchange(completion, nullptr));
      }
    }
    return waiting;
  }

  // Fails the execution, and the ranks in `own`, which no longer wait in a meeting.
  void FailAll(std::unique_lock<std::mutex> lock, int64_t run_id, const Status& status,
               std::chrono::milliseconds deadline, std::vector<Completion> own) {
    std::vector<Completion> waiting = FailRun(run_id, status, deadline);
    const FailureListener listener = listener_;
    lock.unlock();
    for (Completion& completion : own) waiting.push_back(std::move(completion));
    if (listener) listener(run_id, status, deadline);
    CompleteEach(pool_, std::move(waiting), status);
  }

  // A completion runs the rest of a rank's program, which may wait for another rank's. So each runs
  // on its own thread; the caller's own rank (if any) comes last, inline.
  void CompleteAll(Rendezvous& meeting, int self) {
    Completion own;
    if (self >= 0) own = std::exchange(meeting.completions[self], nullptr);
    std::vector<Completion> others;
    for (Completion& completion : meeting.completions) {
      if (completion) others.push_back(std::exchange(completion, nullptr));
    }
    CompleteEach(pool_, std::move(others), Status::Ok());
    if (own) own(Status::Ok());
  }

  void Work(Rendezvous& meeting, int self) {
    if (meeting.tasks.Work(meeting.work.run)) CompleteAll(meeting, self);
  }

  // Runs tasks that wait for one another when the gate opens. The last one clears the work, perhaps
  // before the gate or the loop that starts them has returned: keep both alive here.
  void RunWhenOpen(int64_t run_id, const std::shared_ptr<Rendezvous>& meeting) {
    auto begin = [this, run_id, meeting] {
      pool_.RunAtOnce(
          meeting->work.num_tasks, [meeting](int64_t task) { meeting->work.run(task); },
          [this, run_id, meeting] { Finish(run_id, *meeting); });
    };
    if (const auto gate = std::move(meeting->work.gate)) {
      gate(std::move(begin));
    } else {
      begin();
    }
  }

  void Finish(int64_t run_id, Rendezvous& meeting) {
    const Status status = meeting.work.outcome ? meeting.work.outcome() : Status::Ok();
    meeting.work = {};  // releases what it holds before any rank is notified
    if (status.ok()) {
      CompleteAll(meeting, /*self=*/-1);
      return;
    }
    FailAll(std::unique_lock<std::mutex>(mutex_), run_id, status, meeting.deadline,
            std::move(meeting.completions));
  }

  void Watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const Clock::time_point now = Clock::now();
      next_wake_ = failed_runs_.Forget(now);
      struct Expired {
        int64_t run_id;
        std::chrono::milliseconds deadline;
        Status status;
        std::vector<Completion> completions;
      };
      std::vector<Expired> expired;
      for (auto it = meetings_.begin(); it != meetings_.end();) {
        const Rendezvous& meeting = *it->second;
        if (meeting.expires > now) {
          next_wake_ = std::min(next_wake_, meeting.expires);
          ++it;
          continue;
        }
        const Status status{StatusCode::kDeadlineExceeded,
                            MissingRanks(meetings_, it->first, meeting)};
        const int64_t run_id = it->first.run_id;
        const auto deadline = meeting.deadline;  // of a meeting that is about to be erased
        expired.push_back({run_id, deadline, status, FailRun(run_id, status, deadline)});
        it = meetings_.begin();  // several may have been erased
      }
      const FailureListener listener = listener_;
      lock.unlock();
      for (Expired& e : expired) {
        if (listener) listener(e.run_id, e.status, e.deadline);
        CompleteEach(pool_, std::move(e.completions), e.status);
      }
      lock.lock();
      if (Clock::now() < next_wake_) wake_.wait_until(lock, next_wake_);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Clock::time_point next_wake_ = Clock::now();
  Meetings meetings_;
  FailedRuns failed_runs_;
  FailureListener listener_;
  CompletionPool pool_;
};

InProcess& Instance() {
  static auto* transport = new InProcess;
  return *transport;
}

}  // namespace

Transport& InProcessTransport() { return Instance(); }

void TellFailuresOfInProcess(FailureListener listener) {
  Instance().TellFailures(std::move(listener));
}

}  // namespace cpd
