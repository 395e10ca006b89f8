// Handles messages from other processes on the thread of the links, which must not block.
#include <algorithm>
#include <utility>

#include "transport/shared_exchanges.h"

namespace cpd {
namespace {

// Far more than any job has, or any of its ranks needs.
constexpr int64_t kMostRanks = 1 << 16;
constexpr int64_t kMostBytes = 1 << 30;

}  // namespace

void SharedExchanges::OnMessage(int process, const std::string& bytes) {
  if (bytes.empty()) return;
  int64_t id = 0;
  switch (static_cast<MessageKind>(bytes[0])) {
    case MessageKind::kAnnounce: {
      Announcement announcement;
      if (FromBytes(bytes, &announcement)) OnAnnouncement(process, announcement);
      return;
    }
    case MessageKind::kReady:
      if (FromBytes(bytes, &id)) OnReady(process, id);
      return;
    case MessageKind::kSignal: {
      SignalNotice notice;
      if (FromBytes(bytes, &notice)) OnSignal(notice);
      return;
    }
    case MessageKind::kOver:
      if (FromBytes(bytes, &id)) OnOver(process, id);
      return;
    case MessageKind::kDone:
      if (FromBytes(bytes, &id)) OnDone(process, id);
      return;
    case MessageKind::kFail: {
      FailureNotice notice;
      if (!FromBytes(bytes, &notice)) return;
      notice.deadline_ms = std::clamp<int64_t>(notice.deadline_ms, 0, kLongestDeadline.count());
      if (notice.code != StatusCode::kInvalidArgument &&
          notice.code != StatusCode::kDeadlineExceeded) {
        notice.code = StatusCode::kInternal;
      }
      FailAll(std::unique_lock<std::mutex>(mutex_), notice.run_id, {notice.code, notice.message},
              std::chrono::milliseconds(notice.deadline_ms), {}, /*tell_others=*/false);
      return;
    }
  }
}

void SharedExchanges::OnAnnouncement(int process, const Announcement& announcement) {
  const SharedSegment& segment = segments_.at(process);
  Description description;
  const std::chrono::milliseconds deadline(announcement.deadline_ms);
  const bool is_well_formed =
      announcement.offset >= 0 && announcement.num_bytes >= 0 &&
      announcement.offset <= segment.num_bytes &&
      announcement.num_bytes <= segment.num_bytes - announcement.offset &&
      announcement.num_bytes <= kMostBytes && announcement.num_ranks > 0 &&
      announcement.num_ranks <= kMostRanks && announcement.rank >= 0 &&
      announcement.rank < announcement.num_ranks && announcement.deadline_ms > 0 &&
      announcement.deadline_ms <= kLongestDeadline.count() &&
      // Reads each byte once, so that nothing changes between check and use.
      FromBytes(std::string_view(segment.base + announcement.offset, announcement.num_bytes),
                &description);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto answer_done = [&] {
    links_.Send(process, ToBytes(MessageKind::kDone, announcement.meeting));
  };
  if (!is_well_formed) {
    answer_done();
    FailAll(std::move(lock), announcement.key.run_id,
            Status::Internal("process ", process,
                             " announced a rank in a way that this one cannot read. "
                             "All processes must run the same version."),
            std::chrono::minutes(1), {});
    return;
  }
  if (failed_runs_.Find(announcement.key.run_id)) return answer_done();
  const MeetingPtr meeting = FindOrOpen(announcement.key, announcement.num_ranks, deadline,
                                        description.op, description.signature);
  if (Status status = Arrive(meeting.get(), announcement.rank, process, announcement.num_ranks);
      !status.ok()) {
    answer_done();
    FailAll(std::move(lock), announcement.key.run_id, status, deadline, {});
    return;
  }
  meeting->participants[process].meeting = announcement.meeting;
  meeting->descriptions[announcement.rank] = std::move(description);
  if (!CloseIfComplete(meeting.get())) return;
  lock.unlock();
  pool_.Run([this, meeting] { Proceed(meeting); });
}

SharedExchanges::MeetingPtr SharedExchanges::Find(int process, int64_t id) const {
  const auto found = meetings_.find(id);
  if (found == meetings_.end() || !found->second->participants.count(process)) return nullptr;
  return found->second;
}

void SharedExchanges::OnReady(int process, int64_t id) {
  std::unique_lock<std::mutex> lock(mutex_);
  const MeetingPtr meeting = Find(process, id);
  if (meeting == nullptr) return;
  meeting->participants.at(process).is_ready = true;
  if (meeting->phase != Phase::kWaiting || !meeting->AllReady()) return;
  meeting->phase = Phase::kPulling;
  lock.unlock();
  pool_.Run([this, meeting] { Pull(meeting); });
}

// No process signals before all are ready, so the work exists.
void SharedExchanges::OnSignal(const SignalNotice& notice) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = meetings_.find(notice.meeting);
  if (found == meetings_.end()) return;
  const SharedMeeting& meeting = *found->second;
  const bool is_known = meeting.phase == Phase::kWaiting || meeting.phase == Phase::kPulling;
  if (is_known && meeting.work.add) meeting.work.add(notice.rank, notice.counter);
}

void SharedExchanges::OnOver(int process, int64_t id) {
  std::unique_lock<std::mutex> lock(mutex_);
  const MeetingPtr meeting = Find(process, id);
  if (meeting == nullptr) return;
  SharedMeeting::Participant& its = meeting->participants.at(process);
  its.is_over = its.is_done = true;
  FreeIfDone(meeting.get());
  if (meeting->phase == Phase::kEnding && meeting->AllOver()) {
    EndWell(std::move(lock), meeting.get());
  }
}

void SharedExchanges::OnDone(int process, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const MeetingPtr meeting = Find(process, id);
  if (meeting == nullptr) return;
  meeting->participants.at(process).is_done = true;
  FreeIfDone(meeting.get());
}

}  // namespace cpd
