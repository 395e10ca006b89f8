// The memory of one process that the other processes of its job read: ranges of one segment.
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
#include <utility>
#include <vector>

#include "transport/announcement.h"
#include "transport/completion_pool.h"
#include "transport/links.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace cpd {

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

// ---- One exchange between processes, as seen by one of them: arrived ranks and progress.

enum class Phase : uint8_t {
  kMeeting,  // ranks are missing
  kStaging,  // rows are being copied to where other processes read them
  kWaiting,  // for the rows of the other processes
  kPulling,  // local ranks receive rows, or tasks wait for ranks elsewhere
  kEnding,   // local tasks have succeeded; waiting for those of the other processes
  kOver,     // local ranks have been notified; others may still read this process's rows
};

struct SharedMeeting {
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

  // ---- By process, without this one.
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
  // Whether local ranks wait for other processes, by the deadline. Without a local rank nothing
  // waits here: the processes that have one know more and will report.
  bool Waits() const;
  bool AllReady() const;
  bool AllOver() const;
  // Whether this process still needs something from `process`, which has ended.
  bool Misses(int process) const;
};

using SharedMeetings = std::vector<std::shared_ptr<SharedMeeting>>;

// "process 2 (pid 4711, stopped)"; asks the system for the state.
std::string ProcessName(int process, int64_t pid);

// Why `meeting`, whose deadline has passed, is not complete. `pid_of` maps processes to pids;
// `others` are meetings in which missing ranks wait instead, or did until recently.
std::string WhyLate(const SharedMeeting& meeting, const SharedMeetings& others,
                    const std::function<int64_t(int)>& pid_of);

// Why it cannot complete: a process has ended.
std::string WhyLost(const SharedMeeting& meeting, int process, int64_t pid);

// ---- All exchanges between processes that involve this one, and their progress.

class SharedExchanges final : public Transport {
 public:
  SharedExchanges(SharedSegment own, std::vector<SharedSegment> others, std::vector<Peer> peers);
  void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
            Completion completion, int, const Scheduler&) override;
  void Fail(int64_t run_id, const Status& status, std::chrono::milliseconds deadline) override;
  void Refuse(const Exchange& exchange, const Status& status, Completion completion) override;
  int process() const { return process_; }

 private:
  using Clock = std::chrono::steady_clock;
  using MeetingPtr = std::shared_ptr<SharedMeeting>;

  // ---- Ranks arrive.

  // Writes the rank's contribution into this process's segment and reserves address space for its
  // arrays.
  Status Publish(const Exchange& exchange, Contribution* contribution, Announcement* announcement,
                 int64_t* range_bytes);

  // The functions below are called with the lock held, unless stated otherwise.

  MeetingPtr FindOrOpen(const ExchangeKey& key, int num_ranks, std::chrono::milliseconds deadline,
                        const std::string& op, const std::string& signature);
  void Adopt(const Exchange& exchange, SharedMeeting* meeting);
  Status Arrive(SharedMeeting* meeting, int rank, int process, int num_ranks);

  // Returns true if the caller should proceed. The next round of a loop opens a new meeting under
  // the same key.
  bool CloseIfComplete(SharedMeeting* meeting);

  // ---- All ranks have arrived. These are called without the lock.

  void Proceed(const MeetingPtr& meeting);

  // A planner that throws (no memory for a plan with very many pieces) also fails every rank.
  Status Plan(SharedMeeting* meeting);

  // For tasks of `meeting` that wait for ranks of other processes.
  Elsewhere ElsewhereOf(SharedMeeting* meeting);

  // The contribution of a rank elsewhere, with its arrays at the addresses where this process reads
  // them.
  Status ReadRank(SharedMeeting* meeting, int rank);
  void RunAll(int64_t num_tasks, std::function<void(int64_t)> run, std::function<void()> then);
  void EndStaging(const MeetingPtr& meeting);
  void Pull(const MeetingPtr& meeting);
  void EndPulling(const MeetingPtr& meeting);
  void EndWell(std::unique_lock<std::mutex> lock, SharedMeeting* meeting);
  void EndFailed(std::unique_lock<std::mutex> lock, SharedMeeting* meeting);

  // ---- The end, again with the lock held. Each returns the local ranks to notify.

  std::vector<Completion> Close(SharedMeeting* meeting);

  // Data that other processes may still read stays until they report that they are done, or end.
  void FreeIfDone(SharedMeeting* meeting);

  // One failed exchange fails the whole execution, in all processes: see in_process.cc. `own` are
  // ranks that no longer wait in a meeting.
  void FailAll(std::unique_lock<std::mutex> lock, int64_t run_id, const Status& status,
               std::chrono::milliseconds deadline, std::vector<Completion> own,
               bool tell_others = true);

  // A rank that came to the wrong call gives up at about the time when others miss it elsewhere.
  void Remember(const MeetingPtr& meeting);

  // The meetings in which the ranks that `late` misses may wait, now or until recently.
  SharedMeetings OthersThan(const SharedMeeting& late) const;

  // ---- Messages. Called on the thread of the links, which must not block; without the lock.

  void OnMessage(int process, const std::string& bytes);
  void OnAnnouncement(int process, const Announcement& announcement);
  // A meeting that involves `process`, or nullptr.
  MeetingPtr Find(int process, int64_t id) const;
  void OnReady(int process, int64_t id);
  void OnSignal(const SignalNotice& notice);
  void OnOver(int process, int64_t id);
  void OnDone(int process, int64_t id);

  // Data that an ended process has staged can still be read; other data of it never arrives.
  void OnEnd(int process);

  // ---- Deadlines.

  // Makes the watchdog look again by then. Called with the lock held.
  void WakeBy(Clock::time_point time);
  void Watch();

  const int process_;
  const int num_helpers_;
  SharedArena arena_;
  std::map<int, SharedSegment> segments_;  // by process
  std::mutex mutex_;
  std::condition_variable wake_;
  Clock::time_point next_wake_ = Clock::now();
  std::map<int64_t, MeetingPtr> meetings_;  // all whose ranges are in use
  std::map<ExchangeKey, MeetingPtr> open_;  // those with missing ranks
  SharedMeetings given_up_;                 // the latest that never had all ranks
  int64_t next_meeting_ = 0;
  std::set<int> ended_;
  FailedRuns failed_runs_;
  CompletionPool pool_;
  Links links_;  // last: its thread uses all members above
};

}  // namespace cpd
