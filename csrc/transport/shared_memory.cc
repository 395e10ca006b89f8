// Announces ranks of this process to the other processes.
#include "transport/shared_memory.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
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

}  // namespace cpd
