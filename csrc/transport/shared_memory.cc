// The transport between processes of one host. Ranks announce themselves to the other processes;
// each process, when it knows of all ranks, plans the whole exchange, copies what ranks elsewhere
// read into its own segment, and when all have done so pulls what its own ranks are to have.
#include "transport/shared_memory.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "transport/completion_pool.h"
#include "transport/failures.h"
#include "transport/in_process.h"
#include "transport/shared_arena.h"
#include "transport/shared_meeting.h"

namespace cpd {
namespace {

using Clock = std::chrono::steady_clock;
using MeetingPtr = std::shared_ptr<SharedMeeting>;

// Three years, the longest deadline that Python lets through; clocks count nanoseconds.
constexpr int64_t kLongestMs = 100'000'000'000;

// Pieces of work that any thread may run. Threads that come late find nothing.
struct Job {
  int64_t num_tasks;
  std::function<void(int64_t)> run;
  std::function<void()> then;  // run by whoever ends the last piece
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> num_open{0};

  void Work() {
    int64_t num_done = 0;
    for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
      run(task);
      ++num_done;
    }
    // Whoever closes the last task sees every other thread's copies (acquire-release).
    if (num_done > 0 && num_open.fetch_sub(num_done) == num_done) then();
  }
};

class SharedMemory final : public Transport {
 public:
  SharedMemory(SharedSegment own, std::vector<SharedSegment> others, std::vector<Peer> peers)
      : process_(own.process),
        num_helpers_(static_cast<int>(std::thread::hardware_concurrency() / (peers.size() + 1)) -
                     1),
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

  void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
            Completion completion, int, const Scheduler&) override {
    const auto refuse = [&](const Status& status) {
      std::vector<Completion> own;
      own.push_back(std::move(completion));
      FailAll(std::unique_lock<std::mutex>(mutex_), exchange.key.run_id, status, exchange.deadline,
              std::move(own));
    };
    if (exchange.processes == nullptr ||
        static_cast<int>(exchange.processes->size()) != exchange.num_ranks || rank < 0 ||
        rank >= exchange.num_ranks || (*exchange.processes)[rank] != process_) {
      return refuse({StatusCode::kInternal,
                     exchange.op + ": rank " + std::to_string(rank) + " is not one of process " +
                         std::to_string(process_) +
                         ". Every other mesh axis must be manual where this is called, so that "
                         "each of its groups is told apart."});
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
          failure = {StatusCode::kInternal, WhyLost(*meeting, process, links_.pid(process))};
        }
      }
    }
    if (!failure.ok()) {
      arena_.Free(range.first, range.second);  // nobody has been told of it
      std::vector<Completion> own;
      own.push_back(std::move(completion));
      FailAll(std::move(lock), exchange.key.run_id, failure, exchange.deadline, std::move(own));
      return;
    }
    meeting->contributions[rank] = std::move(contribution);
    meeting->completions[rank] = std::move(completion);
    meeting->ranges.push_back(range);
    announcement.meeting = meeting->id;
    for (const auto& [process, participant] : meeting->participants) {
      links_.Send(process, ToBytes(announcement));
    }
    if (!CloseIfComplete(meeting.get())) return;
    lock.unlock();
    Proceed(meeting);
  }

  void Fail(int64_t run_id, const Status& status, std::chrono::milliseconds deadline) override {
    FailAll(std::unique_lock<std::mutex>(mutex_), run_id, status, deadline, {});
  }

  void Refuse(const Exchange& exchange, const Status& status, Completion completion) override {
    std::vector<Completion> own;
    own.push_back(std::move(completion));
    FailAll(std::unique_lock<std::mutex>(mutex_), exchange.key.run_id, status, exchange.deadline,
            std::move(own));
  }

  int process() const { return process_; }

 private:
  // ---- Ranks arrive.

  // Writes what the rank brings into this process's segment, with address space for its arrays.
  Status Publish(const Exchange& exchange, Contribution* contribution, Announcement* announcement,
                 int64_t* range_bytes) {
    const std::vector<SharedArray> arrays = contribution->SharedArrays();
    Description description{exchange.op, std::string(exchange.signature),
                            std::vector<int64_t>(arrays.size()), contribution->Write()};
    announcement->num_bytes = static_cast<int64_t>(ToBytes(description).size());
    int64_t total = SharedArena::PageAligned(announcement->num_bytes);
    for (const SharedArray& array : arrays) total += SharedArena::PageAligned(array.num_bytes);
    const int64_t offset = arena_.Allocate(total);
    if (offset < 0) {
      return {StatusCode::kInternal,
              "arrays of " + std::to_string(total) +
                  " bytes do not fit the free part of this "
                  "process's segment of " +
                  std::to_string(arena_.num_bytes()) +
                  " bytes. Set JAX_CP_DISPATCH_SEGMENT_BYTES to more, in all processes."};
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

  // The functions below are called with the lock held, unless they say otherwise.

  MeetingPtr FindOrOpen(const ExchangeKey& key, int num_ranks, std::chrono::milliseconds deadline,
                        const std::string& op, const std::string& signature) {
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

  void Adopt(const Exchange& exchange, SharedMeeting* meeting) {
    meeting->exchange = exchange;
    meeting->has_exchange = true;
    meeting->expires = Clock::now() + meeting->deadline;
    WakeBy(meeting->expires);
    for (const int process : *exchange.processes) {
      if (process != process_) meeting->participants.try_emplace(process);
    }
  }

  Status Arrive(SharedMeeting* meeting, int rank, int process, int num_ranks) {
    if (num_ranks != meeting->num_ranks() || meeting->arrived[rank]) {
      std::ostringstream message;
      message << meeting->op << ": rank " << rank << " of process " << process << " arrived twice, "
              << "or in a group of " << num_ranks << " instead of " << meeting->num_ranks()
              << " ranks. Every other mesh axis must be manual where this is called, so that each "
                 "of its groups is told apart.";
      return {StatusCode::kInternal, message.str()};
    }
    meeting->arrived[rank] = true;
    meeting->process[rank] = process;
    ++meeting->num_arrived;
    return Status::Ok();
  }

  // True for who is to proceed. The next round of a loop opens a new meeting under the same key.
  bool CloseIfComplete(SharedMeeting* meeting) {
    if (meeting->num_arrived < meeting->num_ranks() || !meeting->has_exchange) return false;
    open_.erase(meeting->key);
    meeting->phase = Phase::kStaging;
    return true;
  }

  // ---- All ranks have arrived. These are called without the lock.

  void Proceed(const MeetingPtr& meeting) {
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
        [&staging](int64_t i) {
          std::memcpy(staging[i].to, staging[i].from, staging[i].num_bytes);
        },
        [this, meeting] { EndStaging(meeting); });
  }

  // A planner that throws (no memory for a plan of very many pieces) fails every rank too.
  Status Plan(SharedMeeting* meeting) {
    const Exchange& exchange = meeting->exchange;
    try {
      for (int rank = 0; rank < meeting->num_ranks(); ++rank) {
        if (meeting->process[rank] == process_) continue;
        if (Status status = ReadRank(meeting, rank); !status.ok()) return status;
      }
      Status status = exchange.planner(meeting->contributions, &meeting->work);
      if (!status.ok()) return status;
      if (meeting->work.tasks_wait) {
        return {StatusCode::kInternal,
                exchange.op +
                    ": its pieces wait for one another, which this transport does not "
                    "offer between processes. Pass implementation='xla'."};
      }
      for (const StagedCopy& copy : meeting->work.staging) {
        status = arena_.Commit(copy.to - arena_.at(0), copy.num_bytes);
        if (!status.ok()) return {status.code, exchange.op + ": " + status.message};
      }
      return status;
    } catch (const std::exception& error) {
      return {StatusCode::kInternal, exchange.op + ": planning the copies threw " + error.what()};
    }
  }

  // What a rank elsewhere brings, with its arrays where this process reads them.
  Status ReadRank(SharedMeeting* meeting, int rank) {
    const Description& description = meeting->descriptions[rank];
    const SharedSegment& segment = segments_.at(meeting->process[rank]);
    const auto refuse = [&](const std::string& why) -> Status {
      return Status::Invalid(meeting->op + ": rank " + std::to_string(rank) + " of process " +
                             std::to_string(segment.process) + " " + why);
    };
    if (description.signature != meeting->exchange.signature) {
      return refuse(
          "came with another call. Expected: " + std::string(meeting->exchange.signature) +
          ". Seen: " + description.signature + ".");
    }
    auto contribution = meeting->exchange.reader(description.contribution);
    const auto arrays = contribution ? contribution->SharedArrays() : std::vector<SharedArray>{};
    if (!contribution || arrays.size() != description.array_offsets.size()) {
      return refuse("sent bytes that are none of a rank. All processes must run the same version.");
    }
    for (size_t i = 0; i < arrays.size(); ++i) {
      const int64_t offset = description.array_offsets[i];
      if (offset < 0 || offset > segment.num_bytes ||
          arrays[i].num_bytes > segment.num_bytes - offset) {
        return refuse("names rows outside of its segment of " + std::to_string(segment.num_bytes) +
                      " bytes.");
      }
      *arrays[i].shared = segment.base + offset;
    }
    meeting->contributions[rank] = std::move(contribution);
    return Status::Ok();
  }

  void RunAll(int64_t num_tasks, std::function<void(int64_t)> run, std::function<void()> then) {
    if (num_tasks == 0) return then();
    auto job = std::make_shared<Job>();
    job->num_tasks = num_tasks;
    job->num_open = num_tasks;
    job->run = std::move(run);
    job->then = std::move(then);
    for (int64_t i = 0; i < std::min<int64_t>(num_helpers_, num_tasks - 1); ++i) {
      pool_.Run([job] { job->Work(); });
    }
    job->Work();
  }

  void EndStaging(const MeetingPtr& meeting) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!meeting->failure.ok()) return EndFailed(std::move(lock), meeting.get());
    meeting->phase = Phase::kWaiting;
    meeting->expires = Clock::now() + meeting->deadline;
    WakeBy(meeting->expires);
    for (const auto& [process, participant] : meeting->participants) {
      links_.Send(process, ToBytes(MessageKind::kReady, participant.meeting));
    }
    if (!meeting->AllReady()) return;
    meeting->phase = Phase::kPulling;
    lock.unlock();
    Pull(meeting);
  }

  void Pull(const MeetingPtr& meeting) {
    RunAll(
        meeting->work.num_tasks, [meeting](int64_t task) { meeting->work.run(task); },
        [this, meeting] { EndPulling(meeting); });
  }

  void EndPulling(const MeetingPtr& meeting) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!meeting->failure.ok()) return EndFailed(std::move(lock), meeting.get());
    std::vector<Completion> completions = Close(meeting.get());
    lock.unlock();
    CompleteEach(pool_, std::move(completions), Status::Ok());
  }

  void EndFailed(std::unique_lock<std::mutex> lock, SharedMeeting* meeting) {
    const Status failure = meeting->failure;
    FailAll(std::move(lock), meeting->key.run_id, failure, meeting->deadline, Close(meeting));
  }

  // ---- The end, again with the lock held. The ranks of this process are handed back to be told.

  std::vector<Completion> Close(SharedMeeting* meeting) {
    meeting->phase = Phase::kOver;
    std::vector<Completion> completions;
    for (Completion& completion : meeting->completions) {
      if (completion) completions.push_back(std::exchange(completion, nullptr));
    }
    for (const auto& [process, participant] : meeting->participants) {
      if (participant.meeting < 0) continue;
      links_.Send(process, ToBytes(MessageKind::kDone, participant.meeting));
    }
    FreeIfDone(meeting);
    return completions;
  }

  // What other processes may still read stays until they say, or have ended.
  void FreeIfDone(SharedMeeting* meeting) {
    if (meeting->phase != Phase::kOver) return;
    for (const auto& [process, participant] : meeting->participants) {
      if (!participant.is_done && !ended_.count(process) && !meeting->ranges.empty()) return;
    }
    for (const auto& [offset, num_bytes] : meeting->ranges) arena_.Free(offset, num_bytes);
    meeting->ranges.clear();
    meetings_.erase(meeting->id);
  }

  // One failed exchange fails the whole execution, in all processes: see in_process.cc. `own` are
  // ranks that wait in no meeting (any more).
  void FailAll(std::unique_lock<std::mutex> lock, int64_t run_id, const Status& status,
               std::chrono::milliseconds deadline, std::vector<Completion> own,
               bool tell_others = true) {
    const bool is_new = failed_runs_.Find(run_id) == nullptr;
    const Status why = is_new ? status : *failed_runs_.Find(run_id);  // the first says why
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
          for (Completion& completion : Close(meeting.get())) own.push_back(std::move(completion));
          break;
        case Phase::kStaging:
        case Phase::kPulling:  // told when the pieces that are running have ended
          if (meeting->failure.ok()) meeting->failure = why;
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

  // A rank that came to the wrong call gives up at about the time when others miss it elsewhere.
  void Remember(const MeetingPtr& meeting) {
    constexpr size_t kMany = 64;
    if (given_up_.size() == kMany) given_up_.erase(given_up_.begin());
    given_up_.push_back(meeting);
  }

  // Where ranks wait that `late` may miss, or did not long ago.
  SharedMeetings OthersThan(const SharedMeeting& late) const {
    SharedMeetings others;
    for (const MeetingPtr& meeting : given_up_) {
      if (meeting->began > Clock::now() - 2 * late.deadline) others.push_back(meeting);
    }
    for (const auto& [key, meeting] : open_) {
      if (meeting->id != late.id) others.push_back(meeting);
    }
    return others;
  }

  // ---- Messages: on the thread of the links, which must not wait, without the lock.

  void OnMessage(int process, const std::string& bytes) {
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
      case MessageKind::kDone:
        if (FromBytes(bytes, &id)) OnDone(process, id);
        return;
      case MessageKind::kFail: {
        FailureNotice notice;
        if (!FromBytes(bytes, &notice)) return;
        notice.deadline_ms = std::clamp<int64_t>(notice.deadline_ms, 0, kLongestMs);
        FailAll(std::unique_lock<std::mutex>(mutex_), notice.run_id, {notice.code, notice.message},
                std::chrono::milliseconds(notice.deadline_ms), {}, /*tell_others=*/false);
        return;
      }
    }
  }

  void OnAnnouncement(int process, const Announcement& announcement) {
    const SharedSegment& segment = segments_.at(process);
    Description description;
    const std::chrono::milliseconds deadline(announcement.deadline_ms);
    const bool is_well_formed =
        announcement.offset >= 0 && announcement.num_bytes >= 0 &&
        announcement.offset <= segment.num_bytes &&
        announcement.num_bytes <= segment.num_bytes - announcement.offset &&
        announcement.num_ranks > 0 && announcement.rank >= 0 &&
        announcement.rank < announcement.num_ranks && announcement.deadline_ms > 0 &&
        announcement.deadline_ms <= kLongestMs &&
        FromBytes(std::string(segment.base + announcement.offset, announcement.num_bytes),
                  &description);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto answer_done = [&] {
      links_.Send(process, ToBytes(MessageKind::kDone, announcement.meeting));
    };
    if (!is_well_formed) {
      answer_done();
      FailAll(std::move(lock), announcement.key.run_id,
              {StatusCode::kInternal, "process " + std::to_string(process) +
                                          " announced a rank in a way that this one cannot read. "
                                          "All processes must run the same version."},
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

  void OnReady(int process, int64_t id) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = meetings_.find(id);
    if (found == meetings_.end()) return;
    const MeetingPtr meeting = found->second;
    meeting->participants[process].is_ready = true;
    if (meeting->phase != Phase::kWaiting || !meeting->AllReady()) return;
    meeting->phase = Phase::kPulling;
    lock.unlock();
    pool_.Run([this, meeting] { Pull(meeting); });
  }

  void OnDone(int process, int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = meetings_.find(id);
    if (found == meetings_.end()) return;
    const MeetingPtr meeting = found->second;
    meeting->participants[process].is_done = true;
    FreeIfDone(meeting.get());
  }

  // What a process that has ended has staged can still be read; what it has not, never comes.
  void OnEnd(int process) {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.insert(process);
    std::vector<MeetingPtr> its;
    for (const auto& [id, meeting] : meetings_) {
      if (meeting->participants.count(process)) its.push_back(meeting);
    }
    std::map<int64_t, std::pair<Status, std::chrono::milliseconds>> lost;  // by run
    for (const MeetingPtr& meeting : its) {
      FreeIfDone(meeting.get());
      if (meeting->phase >= Phase::kPulling || meeting->participants[process].is_ready) continue;
      lost.try_emplace(
          meeting->key.run_id,
          Status{StatusCode::kInternal, WhyLost(*meeting, process, links_.pid(process))},
          meeting->deadline);
    }
    lock.unlock();
    for (const auto& [run_id, why] : lost) Fail(run_id, why.first, why.second);
  }

  // ---- Deadlines.

  // The watchdog looks again by then. Called with the lock held.
  void WakeBy(Clock::time_point time) {
    if (time >= next_wake_) return;
    next_wake_ = time;
    wake_.notify_one();
  }

  void Watch() {
    const auto pid_of = [this](int process) { return links_.pid(process); };
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const Clock::time_point now = Clock::now();
      next_wake_ = failed_runs_.Forget(now);
      std::map<int64_t, std::pair<Status, std::chrono::milliseconds>> late;  // by run
      for (const auto& [id, meeting] : meetings_) {
        if (meeting->phase != Phase::kMeeting && meeting->phase != Phase::kWaiting) continue;
        // Nobody waits here: the processes whose ranks do know more, and will tell.
        if (!meeting->has_exchange) continue;
        if (meeting->expires > now) {
          next_wake_ = std::min(next_wake_, meeting->expires);
          continue;
        }
        late.try_emplace(
            meeting->key.run_id,
            Status{StatusCode::kDeadlineExceeded, WhyLate(*meeting, OthersThan(*meeting), pid_of)},
            meeting->deadline);
      }
      lock.unlock();
      for (const auto& [run_id, why] : late) Fail(run_id, why.first, why.second);
      lock.lock();
      if (Clock::now() < next_wake_) wake_.wait_until(lock, next_wake_);
    }
  }

  const int process_;
  const int num_helpers_;
  SharedArena arena_;
  std::map<int, SharedSegment> segments_;  // of the other processes
  std::mutex mutex_;
  std::condition_variable wake_;
  Clock::time_point next_wake_ = Clock::now();
  std::map<int64_t, MeetingPtr> meetings_;  // all whose ranges are in use
  std::map<ExchangeKey, MeetingPtr> open_;  // those that miss ranks
  SharedMeetings given_up_;                 // the last that never had all ranks
  int64_t next_meeting_ = 0;
  std::set<int> ended_;
  FailedRuns failed_runs_;
  CompletionPool pool_;
  Links links_;  // last: its thread uses everything above
};

SharedMemory* started = nullptr;

}  // namespace

std::unique_ptr<Transport> MakeSharedMemoryTransport(SharedSegment own,
                                                     std::vector<SharedSegment> others,
                                                     std::vector<Peer> peers) {
  return std::make_unique<SharedMemory>(own, std::move(others), std::move(peers));
}

Transport* SharedMemoryTransport() { return started; }

void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers) {
  if (started != nullptr) return;
  started = new SharedMemory(own, std::move(others), std::move(peers));
  TellFailuresOfInProcess(
      [](int64_t run_id, const Status& status, std::chrono::milliseconds deadline) {
        started->Fail(run_id, status, deadline);
      });
}

int ThisProcess() { return started ? started->process() : 0; }

}  // namespace cpd
