// What the transports share of failing: executions that have failed, and how their ranks are told.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "transport/completion_pool.h"
#include "transport/transport.h"

namespace cpd {

// Tombstones: who comes later to anything of these executions fails at once.
class FailedRuns {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns when it is forgotten: after a deadline, when nobody waits for a late one any more.
  Clock::time_point Add(int64_t run_id, const Status& status, std::chrono::milliseconds deadline);
  const Status* Find(int64_t run_id) const;  // none: it has not failed
  // Returns when there is something to forget next.
  Clock::time_point Forget(Clock::time_point now);

 private:
  struct Failure {
    Status status;
    Clock::time_point forgotten;
  };
  std::map<int64_t, Failure> runs_;
};

// A completion runs the rest of a rank's program, which may wait for another rank's: each on its
// own thread. A failure comes a little late: XLA abandons the rest of a rank's program, also a
// collective that needs nothing of ours, in which other ranks may wait already and, without this
// one, would for ever. Until then the rank gets to what is ready.
void CompleteEach(CompletionPool& pool, std::vector<Completion> completions, const Status& status);

// "[0, 3]": the ranks for which `arrived` is `wanted`.
std::string RankList(const std::vector<bool>& arrived, bool wanted);

}  // namespace cpd
