// One exchange, as seen by one process: arrived ranks, progress, and the words for what is missing.
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
  kStaging,  // planned; rows are being copied to where other processes read them
  kWaiting,  // for the rows of the other processes
  kPulling,  // local ranks receive rows, or tasks wait for ranks elsewhere
  kEnding,   // local tasks have succeeded; waiting for those of the other processes
  kOver,     // local ranks have been notified; others may still read this process's rows
};

struct Meeting {
  int64_t id;  // in this process
  ExchangeKey key;
  std::string op;
  std::string signature;
  std::chrono::milliseconds deadline;
  std::chrono::steady_clock::time_point began;
  std::chrono::steady_clock::time_point expires;  // if a local rank waits
  bool is_overdue = false;  // expired once; messages that have arrived are still unread
  Phase phase = Phase::kMeeting;

  // From the first local rank to arrive. Until then, only ranks elsewhere have announced
  // themselves.
  Exchange exchange;
  bool has_exchange = false;

  // ---- By rank.
  int num_arrived = 0;
  std::vector<bool> arrived;
  std::vector<int> process;  // of the ranks that have arrived
  std::vector<std::unique_ptr<Contribution>> contributions;
  std::vector<Description> descriptions;  // of ranks elsewhere
  std::vector<Completion> completions;    // of local ranks

  // ---- By process, without this one; empty if all ranks are here.
  struct Participant {
    int64_t meeting = -1;   // the exchange, as numbered by that process; -1: nothing announced yet
    bool is_ready = false;  // its rows are staged for ranks of this process
    bool is_over = false;   // its tasks have succeeded
    bool is_done = false;   // it no longer reads rows of this process
  };
  std::map<int, Participant> participants;

  std::vector<std::pair<int64_t, int64_t>> ranges;  // of the segment: offset, bytes
  WorkList work;
  Status failure;  // of an execution that failed while tasks were running

  int num_ranks() const { return static_cast<int>(arrived.size()); }
  bool IsLocal() const { return participants.empty(); }
  // Whether local ranks wait for others, by the deadline. Without a local rank nothing waits here:
  // the processes that have one know more and will report.
  bool Waits() const;
  // Whether all other processes have come so far.
  bool All(bool Participant::* have) const;
  // Whether this process still needs something from `process`, which has ended.
  bool Misses(int process) const;
};

using Meetings = std::vector<std::shared_ptr<Meeting>>;

// "process 2 (pid 4711, stopped)"; asks the system for the state.
std::string ProcessName(int process, int64_t pid);

// Why `meeting`, whose deadline has passed, is not complete. `pid_of` maps processes to pids;
// `others` are meetings in which missing ranks wait instead, or did until recently.
std::string WhyLate(const Meeting& meeting, const Meetings& others,
                    const std::function<int64_t(int)>& pid_of);

// Why it cannot complete: a process has ended.
std::string WhyLost(const Meeting& meeting, int process, int64_t pid);

}  // namespace cpd
