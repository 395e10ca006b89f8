// Exchanges between the ranks of this process and, once it is connected, of other processes of the
// host. Ranks publish pointers and return; the last to arrive plans and copies; every rank
// completes on a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/announcement.h"
#include "transport/completion_pool.h"
#include "transport/links.h"
#include "transport/transport.h"
#include "transport/transports.h"

namespace cpd {

// ---- The memory of one process that the other processes of its job read: ranges of one segment.

// Address space costs nothing. Memory is committed where rows are written, and kept for the next
// exchange. All functions are thread-safe.
class SharedArena {
 public:
  static constexpr int64_t kPageBytes = 4096;
  static int64_t PageAligned(int64_t bytes) {
    return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  // `fd` is a segment of `num_bytes`, mapped at `base` by the caller.
  SharedArena(int fd, char* base, int64_t num_bytes);

  // The lowest free range, aligned to pages; -1 if there is none.
  int64_t Allocate(int64_t num_bytes);
  // Frees a range from `Allocate` that is no longer read.
  void Free(int64_t offset, int64_t num_bytes);

  // Commits memory for a range before it is written: a write without memory would kill the process.
  Status Commit(int64_t offset, int64_t num_bytes);

  char* at(int64_t offset) const { return base_ + offset; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void ReturnMemory();  // with the lock held

  const int fd_;
  char* const base_;
  const int64_t num_bytes_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes; no two are adjacent
  std::vector<bool> committed_;      // by granule
  int64_t num_committed_ = 0;
};

// ---- One exchange, as seen by one process: arrived ranks and progress.

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

// ---- All exchanges that involve this process, and their progress.

class Exchanges final : public Transport {
 public:
  Exchanges();
  // Before the first exchange with ranks of other processes.
  void Connect(SharedSegment own, std::vector<SharedSegment> others, std::vector<Peer> peers);
  bool is_connected() const { return links_ != nullptr; }

  void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
            Completion completion, int num_helpers, const Scheduler& scheduler) override;
  void Refuse(const Exchange& exchange, const Status& status, Completion completion) override;

 private:
  using Clock = std::chrono::steady_clock;
  using MeetingPtr = std::shared_ptr<Meeting>;

  // The thread that runs tasks: its rank, or -1, and helpers that it may ask for.
  struct Caller {
    int rank;
    int num_helpers;
    const Scheduler& scheduler;
  };

  // What a closed meeting leaves: local ranks to notify, and work to destroy before, both without
  // the lock.
  struct Closed {
    std::vector<Completion> completions;
    std::vector<WorkList> work = {};

    void Add(Closed other);
  };

  // ---- Ranks arrive.

  // Writes the rank's contribution into this process's segment and reserves address space for its
  // arrays.
  Status Publish(const Exchange& exchange, Contribution* contribution, Announcement* announcement,
                 int64_t* range_bytes);

  // The functions below are called with the lock held, unless stated otherwise.

  MeetingPtr FindOrOpen(const ExchangeKey& key, int num_ranks, std::chrono::milliseconds deadline,
                        const std::string& op, std::string_view signature);
  void Adopt(const Exchange& exchange, Meeting* meeting);
  Status Arrive(Meeting* meeting, int rank, int process, int num_ranks);

  // Returns true if the caller should proceed. The next round of a loop opens a new meeting under
  // the same key.
  bool CloseIfComplete(Meeting* meeting);

  // ---- All ranks have arrived. These are called without the lock.

  void Proceed(const MeetingPtr& meeting, const Caller& caller);

  // A planner that throws (no memory for a plan with very many pieces) also fails every rank.
  Status Plan(Meeting* meeting);

  // For tasks of `meeting` that wait for ranks of other processes.
  Elsewhere ElsewhereOf(Meeting* meeting);

  // The contribution of a rank elsewhere, with its arrays at the addresses where this process reads
  // them.
  Status ReadRank(Meeting* meeting, int rank);
  // Any thread may run any task. `then` runs on the one that ends the last.
  void RunAll(const Caller& caller, int64_t num_tasks, std::function<void(int64_t)> run,
              std::function<void(const Caller&)> then);
  void EndStaging(const MeetingPtr& meeting, const Status& planned, const Caller& caller);
  void Pull(const MeetingPtr& meeting, const Caller& caller);
  void EndPulling(const MeetingPtr& meeting, const Caller& caller);
  // A completion runs the rest of a rank's program, which may wait for another rank's. So each runs
  // on its own thread; that of `rank` (if any) comes last, inline.
  void EndWell(std::unique_lock<std::mutex> lock, Meeting* meeting, int rank);
  void EndFailed(std::unique_lock<std::mutex> lock, Meeting* meeting);
  // A new wait for the other processes begins.
  void WaitFor(Phase phase, Meeting* meeting);

  // ---- The end, again with the lock held.

  Closed Close(Meeting* meeting);

  // Data that other processes may still read stays until they report that they are done, or end.
  void FreeIfDone(Meeting* meeting);

  // One failed exchange fails the whole execution, in all processes. Ranks that continued alone
  // could reach an XLA collective, which waits for the failed ranks and then aborts the process.
  // `own` are ranks that no longer wait in a meeting.
  void FailAll(std::unique_lock<std::mutex> lock, int64_t run_id, const Status& status,
               std::chrono::milliseconds deadline, Closed own, bool tell_others = true);

  // A rank that came to the wrong call gives up at about the time when others miss it elsewhere.
  void Remember(const MeetingPtr& meeting);

  // The meetings in which the ranks that `late` misses may wait, now or until recently.
  Meetings OthersThan(const Meeting& late) const;

  // ---- Messages. Called on the thread of the links, which must not block; without the lock.

  void OnMessage(int process, const std::string& bytes);
  void OnAnnouncement(int process, const Announcement& announcement);
  // A meeting that involves `process`, or nullptr.
  MeetingPtr Find(int process, int64_t id) const;
  void OnReady(int process, int64_t id);
  void OnSignal(const SignalNotice& notice);
  // The process no longer reads rows of this one; its tasks may have succeeded, too.
  void OnDone(int process, int64_t id, bool is_over);

  // Data that an ended process has staged can still be read; other data of it never arrives.
  void OnEnd(int process);
  std::string WhyLostTo(const Meeting& meeting, int process) const {
    return WhyLost(meeting, process, links_->pid(process));
  }

  // ---- Deadlines.

  // Makes the watchdog look again by then. Called with the lock held.
  void WakeBy(Clock::time_point time);
  void Watch();

  const Scheduler to_pool_ = [this](std::function<void()> task) { pool_.Run(std::move(task)); };
  int process_ = 0;
  int num_helpers_ = 0;                    // that the pool has for an exchange between processes
  std::map<int, SharedSegment> segments_;  // by process
  std::mutex mutex_;
  std::condition_variable wake_;
  Clock::time_point next_wake_ = Clock::now();
  std::map<int64_t, MeetingPtr> meetings_;  // all whose ranges are in use
  std::map<ExchangeKey, MeetingPtr> open_;  // those with missing ranks
  Meetings given_up_;                       // the latest that never had all ranks
  int64_t next_meeting_ = 0;
  std::set<int> ended_;
  FailedRuns failed_runs_;
  CompletionPool pool_;
  std::unique_ptr<SharedArena> arena_;
  std::unique_ptr<Links> links_;  // its thread uses all members above
};

}  // namespace cpd
