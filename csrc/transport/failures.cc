// Failed executions, and how their ranks are notified; common to the transports.
#include "transport/failures.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <thread>
#include <utility>

namespace cpd {
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
