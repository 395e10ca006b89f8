// One exchange between processes, as one of them sees it: who has come, and how far it is.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/announcement.h"
#include "transport/transport.h"

namespace cpd {

enum class Phase : uint8_t {
  kMeeting,  // ranks are missing
  kStaging,  // rows are being copied to where ranks elsewhere read them
  kWaiting,  // for the other processes' rows
  kPulling,  // rows come to the ranks of this process, or pieces of work wait for those elsewhere
  kEnding,   // these have succeeded; for those of the other processes
  kOver,     // its ranks have been told; others may still read this process's rows
};

struct SharedMeeting {
  int64_t id;  // in this process
  ExchangeKey key;
  std::string op;
  std::string signature;
  std::chrono::milliseconds deadline;
  std::chrono::steady_clock::time_point began;
  std::chrono::steady_clock::time_point expires;  // if a rank of this process waits
  bool is_overdue = false;  // it has expired once, and what has come meanwhile is still read
  Phase phase = Phase::kMeeting;

  // Of the first local rank to come; without one only the ranks of others have announced
  // themselves.
  Exchange exchange;
  bool has_exchange = false;

  // ---- By rank.
  int num_arrived = 0;
  std::vector<bool> arrived;
  std::vector<int> process;  // of those that have arrived
  std::vector<std::unique_ptr<Contribution>> contributions;
  std::vector<Description> descriptions;  // of ranks elsewhere
  std::vector<Completion> completions;    // of local ranks

  // ---- By process, this one left away.
  struct Participant {
    int64_t meeting = -1;  // the exchange, as that process numbers it; -1: it has announced nothing
    bool is_ready = false;  // its rows lie where ranks of this process read them
    bool is_over = false;   // its pieces of work have succeeded
    bool is_done = false;   // it reads no rows of this process any more
  };
  std::map<int, Participant> participants;

  std::vector<std::pair<int64_t, int64_t>> ranges;  // of the segment: offset, bytes
  WorkList work;
  Status failure;  // of an execution that failed while pieces of work were running

  int num_ranks() const { return static_cast<int>(arrived.size()); }
  // For other processes, by the deadline. Without a rank of this process nobody waits here: those
  // whose ranks do know more, and will tell.
  bool Waits() const;
  bool AllReady() const;
  bool AllOver() const;
  // Whether this process misses something that `process`, which has ended, did not do.
  bool Misses(int process) const;
  bool AllDone() const;
};

using SharedMeetings = std::vector<std::shared_ptr<SharedMeeting>>;

// "process 2 (pid 4711, stopped)", asking the system what became of it.
std::string ProcessName(int process, int64_t pid);

// Why `meeting`, whose deadline has passed, is not complete. `pid_of` knows the processes; `others`
// tell where missing ranks wait instead, or did until just now.
std::string WhyLate(const SharedMeeting& meeting, const SharedMeetings& others,
                    const std::function<int64_t(int)>& pid_of);

// Why it cannot complete: a process has ended.
std::string WhyLost(const SharedMeeting& meeting, int process, int64_t pid);

}  // namespace cpd
