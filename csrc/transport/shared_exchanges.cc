// Handles messages from other processes on the thread of the links, which must not block.
#include "transport/shared_exchanges.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

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

// ---- The exchange after all ranks have arrived: it is planned, and rows for other processes are
// copied into this process's segment. When all processes have done so, local ranks pull their rows.

namespace {

struct Job {
  Tasks tasks;
  std::function<void(int64_t)> run;
  std::function<void()> then;  // run by the thread that ends the last task

  void Work() {
    if (tasks.Work(run)) then();
  }
};

}  // namespace

void SharedExchanges::Proceed(const MeetingPtr& meeting) {
  const Status planned = Plan(meeting.get());
  if (!planned.ok()) {
    std::unique_lock<std::mutex> lock(mutex_);
    meeting->failure = planned;
    lock.unlock();
    EndStaging(meeting);
    return;
  }
  const auto& staging = meeting->work.staging;
  RunAll(
      static_cast<int64_t>(staging.size()),
      [&staging](int64_t i) { std::memcpy(staging[i].to, staging[i].from, staging[i].num_bytes); },
      [this, meeting] { EndStaging(meeting); });
}

Status SharedExchanges::Plan(SharedMeeting* meeting) {
  const Exchange& exchange = meeting->exchange;
  try {
    for (int rank = 0; rank < meeting->num_ranks(); ++rank) {
      if (meeting->process[rank] == process_) continue;
      if (Status status = ReadRank(meeting, rank); !status.ok()) return status;
    }
    meeting->work.elsewhere = ElsewhereOf(meeting);
    Status status = exchange.planner(meeting->contributions, &meeting->work);
    std::vector<SharedRange> written = meeting->work.written;
    for (const StagedCopy& copy : meeting->work.staging) {
      written.push_back({copy.to, copy.num_bytes});
    }
    for (const SharedRange& range : written) {
      if (!status.ok()) return status;
      status = arena_.Commit(range.begin - arena_.at(0), range.num_bytes);
      if (!status.ok()) status.message = exchange.op + ": " + status.message;
    }
    return status;
  } catch (const std::exception& error) {
    return Status::Internal(exchange.op, ": planning the copies failed: ", error.what());
  }
}

Elsewhere SharedExchanges::ElsewhereOf(SharedMeeting* meeting) {
  Elsewhere elsewhere;
  for (const int process : meeting->process) elsewhere.holds.push_back(process != process_);
  elsewhere.add = [this, meeting](int rank, int counter) {
    const int process = meeting->process[rank];
    links_.Send(process,
                ToBytes(MessageKind::kSignal,
                        SignalNotice{meeting->participants.at(process).meeting, rank, counter}));
  };
  elsewhere.name = [this, meeting](int rank) {
    return ProcessName(meeting->process[rank], links_.pid(meeting->process[rank]));
  };
  return elsewhere;
}

Status SharedExchanges::ReadRank(SharedMeeting* meeting, int rank) {
  const Description& description = meeting->descriptions[rank];
  const SharedSegment& segment = segments_.at(meeting->process[rank]);
  const auto refuse = [&](const std::string& why) -> Status {
    return Status::Invalid(meeting->op, ": rank ", rank, " of process ", segment.process, " ", why);
  };
  if (description.signature != meeting->exchange.signature) {
    return refuse("came with another call. Expected: " + std::string(meeting->exchange.signature) +
                  ". Seen: " + description.signature + ".");
  }
  auto contribution = meeting->exchange.reader(description.contribution);
  const auto arrays = contribution ? contribution->SharedArrays() : std::vector<SharedArray>{};
  if (!contribution || arrays.size() != description.array_offsets.size()) {
    return refuse(
        "sent bytes that do not describe a rank. All processes must run the same version.");
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    const int64_t offset = description.array_offsets[i];
    if (offset < 0 || offset > segment.num_bytes || offset % SharedArena::kPageBytes != 0 ||
        arrays[i].num_bytes > segment.num_bytes - offset) {
      return refuse("names rows outside of its segment of " + std::to_string(segment.num_bytes) +
                    " bytes.");
    }
    *arrays[i].shared = segment.base + offset;
  }
  meeting->contributions[rank] = std::move(contribution);
  return Status::Ok();
}

void SharedExchanges::RunAll(int64_t num_tasks, std::function<void(int64_t)> run,
                             std::function<void()> then) {
  if (num_tasks == 0) return then();
  auto job = std::make_shared<Job>();
  job->tasks.Open(num_tasks);
  job->run = std::move(run);
  job->then = std::move(then);
  for (int64_t i = 0; i < std::min<int64_t>(num_helpers_, num_tasks - 1); ++i) {
    pool_.Run([job] { job->Work(); });
  }
  job->Work();
}

void SharedExchanges::EndStaging(const MeetingPtr& meeting) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!meeting->failure.ok()) return EndFailed(std::move(lock), meeting.get());
  meeting->phase = Phase::kWaiting;
  meeting->expires = Clock::now() + meeting->deadline;
  meeting->is_overdue = false;
  WakeBy(meeting->expires);
  for (const auto& [process, participant] : meeting->participants) {
    links_.Send(process, ToBytes(MessageKind::kReady, participant.meeting));
    if (!ended_.count(process) || !meeting->Misses(process)) continue;
    meeting->failure = Status::Internal(WhyLost(*meeting, process, links_.pid(process)));
    return EndFailed(std::move(lock), meeting.get());
  }
  if (!meeting->AllReady()) return;
  meeting->phase = Phase::kPulling;
  lock.unlock();
  Pull(meeting);
}

void SharedExchanges::Pull(const MeetingPtr& meeting) {
  const auto run = [meeting](int64_t task) { meeting->work.run(task); };
  const auto then = [this, meeting] { EndPulling(meeting); };
  if (meeting->work.tasks_wait) {
    pool_.RunAtOnce(meeting->work.num_tasks, run, then);
  } else {
    RunAll(meeting->work.num_tasks, run, then);
  }
}

void SharedExchanges::EndPulling(const MeetingPtr& meeting) {
  const Status status = meeting->work.outcome ? meeting->work.outcome() : Status::Ok();
  std::unique_lock<std::mutex> lock(mutex_);
  if (meeting->failure.ok()) meeting->failure = status;
  if (!meeting->failure.ok()) return EndFailed(std::move(lock), meeting.get());
  if (meeting->work.tasks_wait) {  // local tasks can fail alone; success needs all processes
    meeting->phase = Phase::kEnding;
    meeting->expires = Clock::now() + meeting->deadline;
    meeting->is_overdue = false;
    WakeBy(meeting->expires);
    for (const auto& [process, participant] : meeting->participants) {
      links_.Send(process, ToBytes(MessageKind::kOver, participant.meeting));
    }
    if (!meeting->AllOver()) return;
  }
  EndWell(std::move(lock), meeting.get());
}

void SharedExchanges::EndWell(std::unique_lock<std::mutex> lock, SharedMeeting* meeting) {
  std::vector<Completion> completions = Close(meeting);
  lock.unlock();
  CompleteEach(pool_, std::move(completions), Status::Ok());
}

void SharedExchanges::EndFailed(std::unique_lock<std::mutex> lock, SharedMeeting* meeting) {
  const Status failure = meeting->failure;
  FailAll(std::move(lock), meeting->key.run_id, failure, meeting->deadline, Close(meeting));
}

}  // namespace cpd
