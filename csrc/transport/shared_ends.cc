// The end of exchanges: success, failure, a missed deadline, or the end of a process.
#include <algorithm>
#include <utility>

#include "transport/in_process.h"
#include "transport/shared_exchanges.h"

namespace cpd {
namespace {

constexpr std::chrono::milliseconds kToRead{200};

}  // namespace

std::vector<Completion> SharedExchanges::Close(SharedMeeting* meeting) {
  const bool has_told = meeting->phase == Phase::kEnding;
  meeting->phase = Phase::kOver;
  meeting->work = {};  // releases what it holds before any rank is notified
  std::vector<Completion> completions;
  for (Completion& completion : meeting->completions) {
    if (completion) completions.push_back(std::exchange(completion, nullptr));
  }
  for (const auto& [process, participant] : meeting->participants) {
    if (participant.meeting < 0 || has_told) continue;
    links_.Send(process, ToBytes(MessageKind::kDone, participant.meeting));
  }
  FreeIfDone(meeting);
  return completions;
}

void SharedExchanges::FreeIfDone(SharedMeeting* meeting) {
  if (meeting->phase != Phase::kOver) return;
  for (const auto& [process, participant] : meeting->participants) {
    if (!participant.is_done && !ended_.count(process) && !meeting->ranges.empty()) return;
  }
  for (const auto& [offset, num_bytes] : meeting->ranges) arena_.Free(offset, num_bytes);
  meeting->ranges.clear();
  meetings_.erase(meeting->id);
}

void SharedExchanges::FailAll(std::unique_lock<std::mutex> lock, int64_t run_id,
                              const Status& status, std::chrono::milliseconds deadline,
                              std::vector<Completion> own, bool tell_others) {
  const bool is_new = failed_runs_.Find(run_id) == nullptr;
  const Status why = is_new ? status : *failed_runs_.Find(run_id);  // the first failure is reported
  if (is_new) WakeBy(failed_runs_.Add(run_id, status, deadline));
  std::vector<MeetingPtr> unfinished;
  for (const auto& [id, meeting] : meetings_) {
    if (meeting->key.run_id == run_id) unfinished.push_back(meeting);
  }
  for (const MeetingPtr& meeting : unfinished) {
    switch (meeting->phase) {
      case Phase::kMeeting:
        open_.erase(meeting->key);
        Remember(meeting);
        [[fallthrough]];
      case Phase::kWaiting:
      case Phase::kEnding:
        for (Completion& completion : Close(meeting.get())) own.push_back(std::move(completion));
        break;
      case Phase::kStaging:
      case Phase::kPulling:  // notified when the running pieces have ended
        if (meeting->failure.ok()) meeting->failure = why;
        if (meeting->phase == Phase::kPulling && meeting->work.fail) meeting->work.fail(why);
        break;
      case Phase::kOver:
        break;
    }
  }
  if (is_new && tell_others) {
    const FailureNotice notice{run_id, deadline.count(), status.code, status.message};
    for (const auto& [process, segment] : segments_) links_.Send(process, ToBytes(notice));
  }
  lock.unlock();
  if (is_new) InProcessTransport().Fail(run_id, why, deadline);
  CompleteEach(pool_, std::move(own), why);
}

void SharedExchanges::Remember(const MeetingPtr& meeting) {
  constexpr size_t kMany = 64;
  if (given_up_.size() == kMany) given_up_.erase(given_up_.begin());
  given_up_.push_back(meeting);
}

SharedMeetings SharedExchanges::OthersThan(const SharedMeeting& late) const {
  SharedMeetings others;
  for (const MeetingPtr& meeting : given_up_) {
    if (meeting->began > Clock::now() - 2 * late.deadline) others.push_back(meeting);
  }
  for (const auto& [key, meeting] : open_) {
    if (meeting->id != late.id) others.push_back(meeting);
  }
  return others;
}

void SharedExchanges::OnEnd(int process) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.insert(process);
  std::vector<MeetingPtr> its;
  for (const auto& [id, meeting] : meetings_) {
    if (meeting->participants.count(process)) its.push_back(meeting);
  }
  std::map<int64_t, std::pair<Status, std::chrono::milliseconds>> lost;  // by run
  for (const MeetingPtr& meeting : its) {
    FreeIfDone(meeting.get());
    if (!meeting->Misses(process)) continue;
    lost.try_emplace(meeting->key.run_id,
                     Status::Internal(WhyLost(*meeting, process, links_.pid(process))),
                     meeting->deadline);
  }
  lock.unlock();
  for (const auto& [run_id, why] : lost) Fail(run_id, why.first, why.second);
}

void SharedExchanges::WakeBy(Clock::time_point time) {
  if (time >= next_wake_) return;
  next_wake_ = time;
  wake_.notify_one();
}

void SharedExchanges::Watch() {
  const auto pid_of = [this](int process) { return links_.pid(process); };
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const Clock::time_point now = Clock::now();
    next_wake_ = failed_runs_.Forget(now);
    std::map<int64_t, MeetingPtr> late;  // by run
    for (const auto& [id, meeting] : meetings_) {
      if (!meeting->Waits()) continue;
      if (meeting->expires > now) {
        next_wake_ = std::min(next_wake_, meeting->expires);
        continue;
      }
      // If this process was stopped, messages from the others may still be unread.
      if (!std::exchange(meeting->is_overdue, true)) {
        meeting->expires = now + kToRead;
        next_wake_ = std::min(next_wake_, meeting->expires);
        continue;
      }
      late.try_emplace(meeting->key.run_id, meeting);
    }
    for (const auto& [run_id, meeting] : late) {
      if (!meeting->Waits()) continue;  // it ended while others were failed
      const Status why{StatusCode::kDeadlineExceeded,
                       WhyLate(*meeting, OthersThan(*meeting), pid_of)};
      FailAll(std::move(lock), run_id, why, meeting->deadline, {});
      lock = std::unique_lock<std::mutex>(mutex_);
    }
    if (Clock::now() < next_wake_) wake_.wait_until(lock, next_wake_);
  }
}

}  // namespace cpd
