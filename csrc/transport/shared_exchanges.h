// All exchanges between processes that involve this one, and their progress.
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
#include <vector>

#include "transport/announcement.h"
#include "transport/completion_pool.h"
#include "transport/failures.h"
#include "transport/links.h"
#include "transport/shared_arena.h"
#include "transport/shared_meeting.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace cpd {

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
