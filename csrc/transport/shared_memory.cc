// Announces ranks of this process to the other processes.
#include "transport/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "transport/in_process.h"
#include "transport/shared_exchanges.h"

namespace cpd {
namespace {

SharedExchanges* started = nullptr;

}  // namespace

SharedExchanges::SharedExchanges(SharedSegment own, std::vector<SharedSegment> others,
                                 std::vector<Peer> peers)
    : process_(own.process),
      num_helpers_(static_cast<int>(std::thread::hardware_concurrency() / (peers.size() + 1)) - 1),
      arena_(own.fd, own.base, own.num_bytes),
      links_(
          std::move(peers),
          [this](int process, const std::string& bytes) { OnMessage(process, bytes); },
          [this](int process) { OnEnd(process); }) {
  for (const SharedSegment& segment : others) segments_[segment.process] = segment;
  links_.Start();
  std::thread([this] {
    pthread_setname_np(pthread_self(), "cpd-watchdog");
    Watch();
  }).detach();
}

void SharedExchanges::Join(const Exchange& exchange, int rank,
                           std::unique_ptr<Contribution> contribution, Completion completion,
                           int num_helpers, const Scheduler& scheduler) {
  const auto refuse = [&](const Status& status) {
    Refuse(exchange, status, std::move(completion));
  };
  if (exchange.processes == nullptr ||
      static_cast<int>(exchange.processes->size()) != exchange.num_ranks || rank < 0 ||
      rank >= exchange.num_ranks || (*exchange.processes)[rank] != process_) {
    return refuse(Status::Internal(exchange.op, ": rank ", rank, " is not one of process ",
                                   process_,
                                   ". Every other mesh axis must be manual where this is called, "
                                   "so that its groups can be distinguished."));
  }
  const std::vector<int>& processes = *exchange.processes;
  if (std::count(processes.begin(), processes.end(), process_) == exchange.num_ranks) {
    // No process would read what is published; failures reach the others all the same.
    return InProcessTransport().Join(exchange, rank, std::move(contribution), std::move(completion),
                                     num_helpers, scheduler);
  }
  Announcement announcement{
      exchange.key, rank, exchange.num_ranks, 0, exchange.deadline.count(), 0, 0};
  int64_t range_bytes = 0;
  if (Status status = Publish(exchange, contribution.get(), &announcement, &range_bytes);
      !status.ok()) {
    return refuse(
        {status.code, exchange.op + ": rank " + std::to_string(rank) + ": " + status.message});
  }

  std::unique_lock<std::mutex> lock(mutex_);
  const std::pair<int64_t, int64_t> range{announcement.offset, range_bytes};
  Status failure;
  if (const Status* failed = failed_runs_.Find(exchange.key.run_id)) failure = *failed;
  MeetingPtr meeting;
  if (failure.ok()) {
    meeting = FindOrOpen(exchange.key, exchange.num_ranks, exchange.deadline, exchange.op,
                         std::string(exchange.signature));
    if (!meeting->has_exchange) Adopt(exchange, meeting.get());
    failure = Arrive(meeting.get(), rank, process_, exchange.num_ranks);
    for (const auto& [process, participant] : meeting->participants) {
      if (failure.ok() && ended_.count(process)) {
        failure = Status::Internal(WhyLost(*meeting, process, links_.pid(process)));
      }
    }
  }
  if (!failure.ok()) {
    arena_.Free(range.first, range.second);  // not announced to any process
    FailAll(std::move(lock), exchange.key.run_id, failure, exchange.deadline,
            Only(std::move(completion)));
    return;
  }
  meeting->contributions[rank] = std::move(contribution);
  meeting->completions[rank] = std::move(completion);
  meeting->ranges.push_back(range);
  announcement.meeting = meeting->id;
  for (const auto& [process, participant] : meeting->participants) {
    links_.Send(process, ToBytes(MessageKind::kAnnounce, announcement));
  }
  if (!CloseIfComplete(meeting.get())) return;
  lock.unlock();
  Proceed(meeting);
}

void SharedExchanges::Fail(int64_t run_id, const Status& status,
                           std::chrono::milliseconds deadline) {
  FailAll(std::unique_lock<std::mutex>(mutex_), run_id, status, deadline, {});
}

void SharedExchanges::Refuse(const Exchange& exchange, const Status& status,
                             Completion completion) {
  FailAll(std::unique_lock<std::mutex>(mutex_), exchange.key.run_id, status, exchange.deadline,
          Only(std::move(completion)));
}

Status SharedExchanges::Publish(const Exchange& exchange, Contribution* contribution,
                                Announcement* announcement, int64_t* range_bytes) {
  const std::vector<SharedArray> arrays = contribution->SharedArrays();
  Description description{exchange.op, std::string(exchange.signature),
                          std::vector<int64_t>(arrays.size()), contribution->Write()};
  announcement->num_bytes = static_cast<int64_t>(ToBytes(description).size());
  int64_t total = SharedArena::PageAligned(announcement->num_bytes);
  for (const SharedArray& array : arrays) total += SharedArena::PageAligned(array.num_bytes);
  const int64_t offset = arena_.Allocate(total);
  if (offset < 0) {
    return Status::Internal("arrays of ", total,
                            " bytes do not fit the free part of this "
                            "process's segment of ",
                            arena_.num_bytes(),
                            " bytes. Increase JAX_CP_DISPATCH_SEGMENT_BYTES in all processes.");
  }
  int64_t at = offset + SharedArena::PageAligned(announcement->num_bytes);
  for (size_t i = 0; i < arrays.size(); ++i) {
    description.array_offsets[i] = at;
    *arrays[i].shared = arena_.at(at);
    at += SharedArena::PageAligned(arrays[i].num_bytes);
  }
  if (Status status = arena_.Commit(offset, announcement->num_bytes); !status.ok()) {
    arena_.Free(offset, total);
    return status;
  }
  const std::string bytes = ToBytes(description);
  std::memcpy(arena_.at(offset), bytes.data(), bytes.size());
  announcement->offset = offset;
  *range_bytes = total;
  return Status::Ok();
}

SharedExchanges::MeetingPtr SharedExchanges::FindOrOpen(const ExchangeKey& key, int num_ranks,
                                                        std::chrono::milliseconds deadline,
                                                        const std::string& op,
                                                        const std::string& signature) {
  if (const auto found = open_.find(key); found != open_.end()) return found->second;
  auto meeting = std::make_shared<SharedMeeting>();
  meeting->id = next_meeting_++;
  meeting->key = key;
  meeting->op = op;
  meeting->signature = signature;
  meeting->deadline = deadline;
  meeting->began = Clock::now();
  meeting->arrived.resize(num_ranks, false);
  meeting->process.resize(num_ranks, -1);
  meeting->contributions.resize(num_ranks);
  meeting->descriptions.resize(num_ranks);
  meeting->completions.resize(num_ranks);
  open_.emplace(key, meeting);
  meetings_.emplace(meeting->id, meeting);
  return meeting;
}

void SharedExchanges::Adopt(const Exchange& exchange, SharedMeeting* meeting) {
  meeting->exchange = exchange;
  meeting->has_exchange = true;
  meeting->expires = Clock::now() + meeting->deadline;
  WakeBy(meeting->expires);
  for (const int process : *exchange.processes) {
    if (process != process_) meeting->participants.try_emplace(process);
  }
}

Status SharedExchanges::Arrive(SharedMeeting* meeting, int rank, int process, int num_ranks) {
  if (num_ranks != meeting->num_ranks() || meeting->arrived[rank]) {
    return Status::Internal(
        meeting->op, ": rank ", rank, " of process ", process, " arrived twice, or in a group of ",
        num_ranks, " instead of ", meeting->num_ranks(),
        " ranks. Every other mesh axis must be manual where this is called, so that its groups can "
        "be distinguished.");
  }
  meeting->arrived[rank] = true;
  meeting->process[rank] = process;
  ++meeting->num_arrived;
  return Status::Ok();
}

bool SharedExchanges::CloseIfComplete(SharedMeeting* meeting) {
  if (meeting->num_arrived < meeting->num_ranks() || !meeting->has_exchange) return false;
  open_.erase(meeting->key);
  meeting->phase = Phase::kStaging;
  return true;
}

std::unique_ptr<Transport> MakeSharedMemoryTransport(SharedSegment own,
                                                     std::vector<SharedSegment> others,
                                                     std::vector<Peer> peers) {
  return std::make_unique<SharedExchanges>(own, std::move(others), std::move(peers));
}

Transport* SharedMemoryTransport() { return started; }

void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers) {
  if (started != nullptr) return;
  started = new SharedExchanges(own, std::move(others), std::move(peers));
  TellFailuresOfInProcess(
      [](int64_t run_id, const Status& status, std::chrono::milliseconds deadline) {
        started->Fail(run_id, status, deadline);
      });
}

// ---- The memory of one process that the other processes of its job read: ranges of one segment.

namespace {

constexpr int64_t kGranuleBytes = 1 << 20;  // of memory committed at a time
// If nothing is in use, memory beyond this is returned to the system.
constexpr int64_t kKeptBytes = int64_t{1} << 30;

}  // namespace

SharedArena::SharedArena(int fd, char* base, int64_t num_bytes)
    : fd_(fd),
      base_(base),
      num_bytes_(num_bytes),
      free_{{0, num_bytes}},
      committed_((num_bytes + kGranuleBytes - 1) / kGranuleBytes, false) {}

int64_t SharedArena::Allocate(int64_t num_bytes) {
  if (num_bytes > num_bytes_) return -1;
  const int64_t size = PageAligned(std::max(num_bytes, int64_t{1}));
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) continue;
    const int64_t offset = it->first, left = it->second - size;
    free_.erase(it);
    if (left > 0) free_.emplace(offset + size, left);
    return offset;
  }
  return -1;
}

void SharedArena::Free(int64_t offset, int64_t num_bytes) {
  int64_t size = PageAligned(std::max(num_bytes, int64_t{1}));
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      free_.erase(previous);
    }
  }
  free_.emplace(offset, size);
  if (size == num_bytes_ && num_committed_ * kGranuleBytes > kKeptBytes) ReturnMemory();
}

Status SharedArena::Commit(int64_t offset, int64_t num_bytes) {
  if (num_bytes <= 0) return Status::Ok();
  const int64_t end = (offset + num_bytes - 1) / kGranuleBytes + 1;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t granule = offset / kGranuleBytes; granule < end; ++granule) {
    if (committed_[granule]) continue;
    const int64_t begin = granule * kGranuleBytes;
    const int64_t bytes = std::min(kGranuleBytes, num_bytes_ - begin);
    int failed;
    do {
      failed = fallocate(fd_, 0, begin, bytes);
    } while (failed != 0 && errno == EINTR);
    if (failed != 0) {
      return Status::Internal(
          "no shared memory for ", num_bytes, " bytes that other processes read (",
          std::strerror(errno), "); this process shares ", num_committed_ * kGranuleBytes,
          " bytes. Send less in one call, run fewer processes, or give the machine (or its "
          "container) more memory.");
    }
    committed_[granule] = true;
    ++num_committed_;
  }
  return Status::Ok();
}

void SharedArena::ReturnMemory() {
  int64_t kept = 0;
  for (size_t granule = 0; granule < committed_.size(); ++granule) {
    if (!committed_[granule]) continue;
    if ((kept + 1) * kGranuleBytes <= kKeptBytes) {
      ++kept;
      continue;
    }
    const int64_t begin = static_cast<int64_t>(granule) * kGranuleBytes;
    const int64_t bytes = std::min(kGranuleBytes, num_bytes_ - begin);
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes) != 0) continue;
    committed_[granule] = false;
    --num_committed_;
  }
}

// ---- The end of exchanges: success, failure, a missed deadline, or the end of a process.

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
