// Failed executions, and how their ranks are notified; common to the transports.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "transport/completion_pool.h"
#include "transport/transport.h"

namespace cpd {

// Records of failed executions: a rank that arrives later fails at once.
class FailedRuns {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns when the record expires: after a deadline, when no late rank is expected any more.
  Clock::time_point Add(int64_t run_id, const Status& status, std::chrono::milliseconds deadline);
  const Status* Find(int64_t run_id) const;  // nullptr: it has not failed
  // Returns when the next record expires.
  Clock::time_point Forget(Clock::time_point now);

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
void CompleteEach(CompletionPool& pool, std::vector<Completion> completions, const Status& status);

// Of one rank.
std::vector<Completion> Only(Completion completion);

// "[0, 3]": the ranks for which `arrived` equals `wanted`.
std::string RankList(const std::vector<bool>& arrived, bool wanted);

}  // namespace cpd
