// Exchanges between the ranks of this process and, once it is connected, of other processes of the
// host. Ranks publish pointers and return; the last to arrive plans and copies; every rank
// completes on a thread of its own.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "transport/completion_pool.h"
#include "transport/meeting.h"
#include "transport/transports.h"

namespace cpd {
namespace {

// Far more than any job has, or any of its ranks needs.
constexpr int64_t kMostRanks = 1 << 16;
constexpr int64_t kMostBytes = 1 << 30;
constexpr std::chrono::milliseconds kToRead{200};  // unread messages after a deadline
constexpr int64_t kGranuleBytes = 1 << 20;         // of memory committed at a time
// If nothing is in use, memory beyond this is returned to the system.
constexpr int64_t kKeptBytes = int64_t{1} << 30;

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
  SharedArena(int fd, char* base, int64_t num_bytes)
      : fd_(fd),
        base_(base),
        num_bytes_(num_bytes),
        free_{{0, num_bytes}},
        committed_((num_bytes + kGranuleBytes - 1) / kGranuleBytes, false) {}

  // The lowest free range, aligned to pages; -1 if there is none.
  int64_t Allocate(int64_t num_bytes) {
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

  // Frees a range from `Allocate` that is no longer read.
  void Free(int64_t offset, int64_t num_bytes) {
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

  // Commits memory for a range before it is written: a write without memory would kill the process.
  Status Commit(int64_t offset, int64_t num_bytes) {
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

  char* at(int64_t offset) const { return base_ + offset; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  // Called with the lock held.
  void ReturnMemory() {
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

  const int fd_;
  char* const base_;
  const int64_t num_bytes_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes; no two are adjacent
  std::vector<bool> committed_;      // by granule
  int64_t num_committed_ = 0;
};

// ---- All exchanges that involve this process, and their progress.

class Exchanges final : public Transport {
 public:
  Exchanges() {
    std::thread([this] {
      pthread_setname_np(pthread_self(), "cpd-watchdog");
      Watch();
    }).detach();
  }

  // Before the first exchange with ranks of other processes.
  void Connect(SharedSegment own, std::vector<SharedSegment> others, std::vector<Peer> peers) {
    std::lock_guard<std::mutex> lock(mutex_);
    process_ = own.process;
    num_helpers_ = static_cast<int>(std::thread::hardware_concurrency() / (peers.size() + 1)) - 1;
    arena_ = std::make_unique<SharedArena>(own.fd, own.base, own.num_bytes);
    for (const SharedSegment& segment : others) segments_[segment.process] = segment;
    links_ = std::make_unique<Links>(
        std::move(peers),
        [this](int process, const std::string& bytes) { OnMessage(process, bytes); },
        [this](int process) { OnEnd(process); });
    links_->Start();
  }

  bool is_connected() const { return links_ != nullptr; }

  void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
            Completion completion, int num_helpers, const Scheduler& scheduler) override {
    const std::vector<int>* processes = exchange.processes;
    if (processes != nullptr &&
        (static_cast<int>(processes->size()) != exchange.num_ranks || rank < 0 ||
         rank >= exchange.num_ranks || (*processes)[rank] != process_)) {
      return Refuse(
          exchange,
          Status::Internal(exchange.op, ": rank ", rank, " is not one of process ", process_,
                           ". Every other mesh axis must be manual where this is called, "
                           "so that its groups can be distinguished."),
          std::move(completion));
    }
    // If all ranks are here, no process would read what is published.
    const bool is_local = processes == nullptr || std::count(processes->begin(), processes->end(),
                                                             process_) == exchange.num_ranks;
    Announcement announcement{
        exchange.key, rank, exchange.num_ranks, 0, exchange.deadline.count(), 0, 0};
    int64_t range_bytes = 0;
    if (!is_local) {
      Status status = Publish(exchange, contribution.get(), &announcement, &range_bytes);
      if (!status.ok()) {
        status.message = exchange.op + ": rank " + std::to_string(rank) + ": " + status.message;
        return Refuse(exchange, status, std::move(completion));
      }
    }

    std::unique_lock<std::mutex> lock(mutex_);
    Status failure;
    if (const Status* failed = failed_runs_.Find(exchange.key.run_id)) failure = *failed;
    MeetingPtr meeting;
    if (failure.ok()) {
      meeting = FindOrOpen(exchange.key, exchange.num_ranks, exchange.deadline, exchange.op,
                           exchange.signature);
      if (!meeting->has_exchange) Adopt(exchange, meeting.get());
      failure = Arrive(meeting.get(), rank, process_, exchange.num_ranks);
      for (const auto& [process, participant] : meeting->participants) {
        if (failure.ok() && ended_.count(process)) {
          failure = Status::Internal(WhyLostTo(*meeting, process));
        }
      }
    }
    if (!failure.ok()) {
      if (!is_local)
        arena_->Free(announcement.offset, range_bytes);  // not announced to any process
      return FailAll(std::move(lock), exchange.key.run_id, failure, exchange.deadline,
                     {Only(std::move(completion))});
    }
    meeting->contributions[rank] = std::move(contribution);
    meeting->completions[rank] = std::move(completion);
    if (!is_local) meeting->ranges.emplace_back(announcement.offset, range_bytes);
    announcement.meeting = meeting->id;
    for (const auto& [process, participant] : meeting->participants) {
      links_->Send(process, ToBytes(MessageKind::kAnnounce, announcement));
    }
    if (!CloseIfComplete(meeting.get())) return;
    lock.unlock();
    if (is_local) {
      Proceed(meeting, {rank, num_helpers, scheduler});
    } else {
      Proceed(meeting, {-1, num_helpers_, to_pool_});
    }
  }

  void Refuse(const Exchange& exchange, const Status& status, Completion completion) override {
    FailAll(std::unique_lock<std::mutex>(mutex_), exchange.key.run_id, status, exchange.deadline,
            {Only(std::move(completion))});
  }

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

    void Add(Closed other) {
      std::move(other.completions.begin(), other.completions.end(),
                std::back_inserter(completions));
      std::move(other.work.begin(), other.work.end(), std::back_inserter(work));
    }
  };

  // ---- Ranks arrive.

  // Writes the rank's contribution into this process's segment and reserves address space for its
  // arrays.
  Status Publish(const Exchange& exchange, Contribution* contribution, Announcement* announcement,
                 int64_t* range_bytes) {
    const std::vector<SharedArray> arrays = contribution->SharedArrays();
    Description description{exchange.op, std::string(exchange.signature),
                            std::vector<int64_t>(arrays.size()), contribution->Write()};
    announcement->num_bytes =
        static_cast<int64_t>(ToBytes(MessageKind::kDescription, description).size());
    int64_t total = SharedArena::PageAligned(announcement->num_bytes);
    for (const SharedArray& array : arrays) total += SharedArena::PageAligned(array.num_bytes);
    const int64_t offset = arena_->Allocate(total);
    if (offset < 0) {
      return Status::Internal("arrays of ", total,
                              " bytes do not fit the free part of this "
                              "process's segment of ",
                              arena_->num_bytes(),
                              " bytes. Increase JAX_CP_DISPATCH_SEGMENT_BYTES in all processes.");
    }
    int64_t at = offset + SharedArena::PageAligned(announcement->num_bytes);
    for (size_t i = 0; i < arrays.size(); ++i) {
      description.array_offsets[i] = at;
      *arrays[i].shared = arena_->at(at);
      at += SharedArena::PageAligned(arrays[i].num_bytes);
    }
    if (Status status = arena_->Commit(offset, announcement->num_bytes); !status.ok()) {
      arena_->Free(offset, total);
      return status;
    }
    const std::string bytes = ToBytes(MessageKind::kDescription, description);
    std::memcpy(arena_->at(offset), bytes.data(), bytes.size());
    announcement->offset = offset;
    *range_bytes = total;
    return Status::Ok();
  }

  // The functions below are called with the lock held, unless stated otherwise.

  MeetingPtr FindOrOpen(const ExchangeKey& key, int num_ranks, std::chrono::milliseconds deadline,
                        const std::string& op, std::string_view signature) {
    if (const auto found = open_.find(key); found != open_.end()) return found->second;
    auto meeting = std::make_shared<Meeting>();
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

  void Adopt(const Exchange& exchange, Meeting* meeting) {
    meeting->exchange = exchange;
    meeting->has_exchange = true;
    meeting->expires = Clock::now() + meeting->deadline;
    WakeBy(meeting->expires);
    if (exchange.processes == nullptr) return;
    for (const int process : *exchange.processes) {
      if (process != process_) meeting->participants.try_emplace(process);
    }
  }

  Status Arrive(Meeting* meeting, int rank, int process, int num_ranks) {
    const bool is_one = num_ranks == meeting->num_ranks() && rank >= 0 && rank < num_ranks;
    if (!is_one || meeting->arrived[rank]) {
      return Status::Internal(
          meeting->op, ": rank ", rank,
          process == process_ ? "" : " of process " + std::to_string(process), " arrived ",
          is_one ? "twice; ranks are" : "but ranks are", " 0..", meeting->num_ranks() - 1,
          ". Every other mesh axis must be manual where this is called, so that its groups can be "
          "distinguished.");
    }
    meeting->arrived[rank] = true;
    meeting->process[rank] = process;
    ++meeting->num_arrived;
    return Status::Ok();
  }

  // Returns true if the caller should proceed. The next round of a loop opens a new meeting under
  // the same key.
  bool CloseIfComplete(Meeting* meeting) {
    if (meeting->num_arrived < meeting->num_ranks() || !meeting->has_exchange) return false;
    open_.erase(meeting->key);
    meeting->phase = Phase::kStaging;
    return true;
  }

  // ---- All ranks have arrived. These are called without the lock.

  void Proceed(const MeetingPtr& meeting, const Caller& caller) {
    const Status planned = Plan(meeting.get());
    if (!planned.ok()) return EndStaging(meeting, planned, caller);
    const auto& staging = meeting->work.staging;
    RunAll(
        caller, static_cast<int64_t>(staging.size()),
        [&staging](int64_t i) {
          std::memcpy(staging[i].to, staging[i].from, staging[i].num_bytes);
        },
        [this, meeting](const Caller& caller) { EndStaging(meeting, Status::Ok(), caller); });
  }

  // A planner that throws (no memory for a plan with very many pieces) also fails every rank.
  Status Plan(Meeting* meeting) {
    const Exchange& exchange = meeting->exchange;
    try {
      for (int rank = 0; rank < meeting->num_ranks(); ++rank) {
        if (meeting->process[rank] == process_) continue;
        if (Status status = ReadRank(meeting, rank); !status.ok()) return status;
      }
      if (!meeting->IsLocal()) meeting->work.elsewhere = ElsewhereOf(meeting);
      Status status = exchange.planner(meeting->contributions, &meeting->work);
      std::vector<SharedRange> written = meeting->work.written;
      for (const StagedCopy& copy : meeting->work.staging) {
        written.push_back({copy.to, copy.num_bytes});
      }
      for (const SharedRange& range : written) {
        if (!status.ok()) return status;
        status = arena_->Commit(range.begin - arena_->at(0), range.num_bytes);
        if (!status.ok()) status.message = exchange.op + ": " + status.message;
      }
      return status;
    } catch (const std::exception& error) {
      return Status::Internal(exchange.op, ": planning the copies failed: ", error.what());
    }
  }

  // For tasks of `meeting` that wait for ranks of other processes.
  Elsewhere ElsewhereOf(Meeting* meeting) {
    Elsewhere elsewhere;
    for (const int process : meeting->process) elsewhere.holds.push_back(process != process_);
    elsewhere.add = [this, meeting](int rank, int counter) {
      const int process = meeting->process[rank];
      links_->Send(process,
                   ToBytes(MessageKind::kSignal,
                           SignalNotice{meeting->participants.at(process).meeting, rank, counter}));
    };
    elsewhere.name = [this, meeting](int rank) {
      return ProcessName(meeting->process[rank], links_->pid(meeting->process[rank]));
    };
    return elsewhere;
  }

  // The contribution of a rank elsewhere, with its arrays at the addresses where this process reads
  // them.
  Status ReadRank(Meeting* meeting, int rank) {
    const Description& description = meeting->descriptions[rank];
    const SharedSegment& segment = segments_.at(meeting->process[rank]);
    const auto refuse = [&](const std::string& why) -> Status {
      return Status::Invalid(meeting->op, ": rank ", rank, " of process ", segment.process, " ",
                             why);
    };
    if (description.signature != meeting->exchange.signature) {
      return refuse(
          "came with another call. Expected: " + std::string(meeting->exchange.signature) +
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

  // Any thread may run any task. `then` runs on the one that ends the last.
  void RunAll(const Caller& caller, int64_t num_tasks, std::function<void(int64_t)> run,
              std::function<void(const Caller&)> then) {
    if (num_tasks == 0) return then(caller);
    struct Job {
      Tasks tasks;
      std::function<void(int64_t)> run;
      std::function<void(const Caller&)> then;

      void Work(const Caller& caller) {
        if (tasks.Work(run)) then(caller);
      }
    };
    auto job = std::make_shared<Job>();
    job->tasks.Open(num_tasks);
    job->run = std::move(run);
    job->then = std::move(then);
    try {
      for (int64_t i = 0; i < std::min<int64_t>(caller.num_helpers, num_tasks - 1); ++i) {
        caller.scheduler([this, job] { job->Work({-1, num_helpers_, to_pool_}); });
      }
    } catch (const std::exception&) {  // continue with fewer helpers
    }
    job->Work(caller);
  }

  void EndStaging(const MeetingPtr& meeting, const Status& planned, const Caller& caller) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (meeting->failure.ok()) meeting->failure = planned;
    if (!meeting->failure.ok()) return EndFailed(std::move(lock), meeting.get());
    if (!meeting->IsLocal()) WaitFor(Phase::kWaiting, meeting.get());
    for (const auto& [process, participant] : meeting->participants) {
      links_->Send(process, ToBytes(MessageKind::kReady, participant.meeting));
      if (!ended_.count(process) || !meeting->Misses(process)) continue;
      meeting->failure = Status::Internal(WhyLostTo(*meeting, process));
      return EndFailed(std::move(lock), meeting.get());
    }
    if (!meeting->All(&Meeting::Participant::is_ready)) return;
    meeting->phase = Phase::kPulling;
    lock.unlock();
    Pull(meeting, caller);
  }

  void Pull(const MeetingPtr& meeting, const Caller& caller) {
    const auto run = [meeting](int64_t task) { meeting->work.run(task); };
    const auto then = [this, meeting](const Caller& caller) { EndPulling(meeting, caller); };
    if (!meeting->work.tasks_wait) return RunAll(caller, meeting->work.num_tasks, run, then);
    // The last task clears the work, perhaps before the gate or the loop that starts them has
    // returned.
    auto begin = [this, num_tasks = meeting->work.num_tasks, run, then] {
      pool_.RunAtOnce(num_tasks, run, [this, then] { then({-1, num_helpers_, to_pool_}); });
    };
    if (const auto gate = std::move(meeting->work.gate)) {
      gate(std::move(begin));
    } else {
      begin();
    }
  }

  void EndPulling(const MeetingPtr& meeting, const Caller& caller) {
    const Status status = meeting->work.outcome ? meeting->work.outcome() : Status::Ok();
    std::unique_lock<std::mutex> lock(mutex_);
    if (meeting->failure.ok()) meeting->failure = status;
    if (!meeting->failure.ok()) return EndFailed(std::move(lock), meeting.get());
    // Local tasks that wait can fail alone; success needs all processes.
    if (meeting->work.tasks_wait && !meeting->IsLocal()) {
      WaitFor(Phase::kEnding, meeting.get());
      for (const auto& [process, participant] : meeting->participants) {
        links_->Send(process, ToBytes(MessageKind::kOver, participant.meeting));
      }
      if (!meeting->All(&Meeting::Participant::is_over)) return;
    }
    EndWell(std::move(lock), meeting.get(), caller.rank);
  }

  // A completion runs the rest of a rank's program, which may wait for another rank's. So each runs
  // on its own thread; that of `rank` (if any) comes last, inline.
  void EndWell(std::unique_lock<std::mutex> lock, Meeting* meeting, int rank) {
    Completion own;
    if (rank >= 0) own = std::exchange(meeting->completions[rank], nullptr);
    Closed closed = Close(meeting);
    lock.unlock();
    closed.work.clear();
    CompleteEach(pool_, std::move(closed.completions), Status::Ok());
    if (own) own(Status::Ok());
  }

  void EndFailed(std::unique_lock<std::mutex> lock, Meeting* meeting) {
    const Status failure = meeting->failure;
    FailAll(std::move(lock), meeting->key.run_id, failure, meeting->deadline, Close(meeting));
  }

  // A new wait for the other processes begins.
  void WaitFor(Phase phase, Meeting* meeting) {
    meeting->phase = phase;
    meeting->expires = Clock::now() + meeting->deadline;
    meeting->is_overdue = false;
    WakeBy(meeting->expires);
  }

  // ---- The end, again with the lock held.

  Closed Close(Meeting* meeting) {
    const bool has_told = meeting->phase == Phase::kEnding;
    meeting->phase = Phase::kOver;
    Closed closed;
    closed.work.push_back(std::exchange(meeting->work, {}));
    for (Completion& completion : meeting->completions) {
      if (completion) closed.completions.push_back(std::exchange(completion, nullptr));
    }
    for (const auto& [process, participant] : meeting->participants) {
      if (participant.meeting < 0 || has_told) continue;
      links_->Send(process, ToBytes(MessageKind::kDone, participant.meeting));
    }
    FreeIfDone(meeting);
    return closed;
  }

  // Data that other processes may still read stays until they report that they are done, or end.
  void FreeIfDone(Meeting* meeting) {
    if (meeting->phase != Phase::kOver) return;
    for (const auto& [process, participant] : meeting->participants) {
      if (!participant.is_done && !ended_.count(process) && !meeting->ranges.empty()) return;
    }
    for (const auto& [offset, num_bytes] : meeting->ranges) arena_->Free(offset, num_bytes);
    meeting->ranges.clear();
    meetings_.erase(meeting->id);
  }

  // One failed exchange fails the whole execution, in all processes. Ranks that continued alone
  // could reach an XLA collective, which waits for the failed ranks and then aborts the process.
  // `own` are ranks that no longer wait in a meeting.
  void FailAll(std::unique_lock<std::mutex> lock, int64_t run_id, const Status& status,
               std::chrono::milliseconds deadline, Closed own, bool tell_others = true) {
    const bool is_new = failed_runs_.Find(run_id) == nullptr;
    const Status why =
        is_new ? status : *failed_runs_.Find(run_id);  // the first failure is reported
    if (is_new) WakeBy(failed_runs_.Add(run_id, status, deadline));
    std::vector<MeetingPtr> unfinished;
    for (const auto& [id, meeting] : meetings_) {
      if (meeting->key.run_id == run_id) unfinished.push_back(meeting);
    }
    for (const MeetingPtr& meeting : unfinished) {
      switch (meeting->phase) {
        case Phase::kMeeting:
          open_.erase(meeting->key);
          if (!meeting->IsLocal()) Remember(meeting);
          [[fallthrough]];
        case Phase::kWaiting:
        case Phase::kEnding: own.Add(Close(meeting.get())); break;
        case Phase::kStaging:
        case Phase::kPulling:             // notified when the running pieces have ended
          if (meeting->IsLocal()) break;  // ends well: it misses nobody
          if (meeting->failure.ok()) meeting->failure = why;
          if (meeting->phase == Phase::kPulling && meeting->work.fail) meeting->work.fail(why);
          break;
        case Phase::kOver: break;
      }
    }
    if (is_new && tell_others) {
      // A message must fit one packet.
      const FailureNotice notice{run_id, deadline.count(), status.code,
                                 status.message.substr(0, Links::kMaxMessageBytes / 2)};
      for (const auto& [process, segment] : segments_)
        links_->Send(process, ToBytes(MessageKind::kFail, notice));
    }
    lock.unlock();
    own.work.clear();
    CompleteEach(pool_, std::move(own.completions), why);
  }

  // A rank that came to the wrong call gives up at about the time when others miss it elsewhere.
  void Remember(const MeetingPtr& meeting) {
    constexpr size_t kMany = 64;
    if (given_up_.size() == kMany) given_up_.erase(given_up_.begin());
    given_up_.push_back(meeting);
  }

  // The meetings in which the ranks that `late` misses may wait, now or until recently.
  Meetings OthersThan(const Meeting& late) const {
    Meetings others;
    for (const MeetingPtr& meeting : given_up_) {
      if (meeting->began > Clock::now() - 2 * late.deadline) others.push_back(meeting);
    }
    for (const auto& [key, meeting] : open_) {
      const bool is_same_group = key.run_id == late.key.run_id && key.group == late.key.group &&
                                 meeting->num_ranks() == late.num_ranks();
      if (meeting->id != late.id && (is_same_group || !late.IsLocal())) others.push_back(meeting);
    }
    const auto is_elsewhere = [&](const auto& other) { return other->IsLocal() != late.IsLocal(); };
    others.erase(std::remove_if(others.begin(), others.end(), is_elsewhere), others.end());
    return others;
  }

  // ---- Messages. Called on the thread of the links, which must not block; without the lock.

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
      case MessageKind::kSignal: {
        SignalNotice notice;
        if (FromBytes(bytes, &notice)) OnSignal(notice);
        return;
      }
      case MessageKind::kOver:
      case MessageKind::kDone:
        if (FromBytes(bytes, &id))
          OnDone(process, id, bytes[0] == static_cast<char>(MessageKind::kOver));
        return;
      case MessageKind::kDescription: return;
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

  void OnAnnouncement(int process, const Announcement& announcement) {
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
      links_->Send(process, ToBytes(MessageKind::kDone, announcement.meeting));
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
    pool_.Run([this, meeting] { Proceed(meeting, {-1, num_helpers_, to_pool_}); });
  }

  // A meeting that involves `process`, or nullptr.
  MeetingPtr Find(int process, int64_t id) const {
    const auto found = meetings_.find(id);
    if (found == meetings_.end() || !found->second->participants.count(process)) return nullptr;
    return found->second;
  }

  void OnReady(int process, int64_t id) {
    std::unique_lock<std::mutex> lock(mutex_);
    const MeetingPtr meeting = Find(process, id);
    if (meeting == nullptr) return;
    meeting->participants.at(process).is_ready = true;
    if (meeting->phase != Phase::kWaiting || !meeting->All(&Meeting::Participant::is_ready)) return;
    meeting->phase = Phase::kPulling;
    lock.unlock();
    pool_.Run([this, meeting] { Pull(meeting, {-1, num_helpers_, to_pool_}); });
  }

  // No process signals before all are ready, so the work exists.
  void OnSignal(const SignalNotice& notice) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = meetings_.find(notice.meeting);
    if (found == meetings_.end()) return;
    const Meeting& meeting = *found->second;
    const bool is_known = meeting.phase == Phase::kWaiting || meeting.phase == Phase::kPulling;
    if (is_known && meeting.work.add) meeting.work.add(notice.rank, notice.counter);
  }

  // The process no longer reads rows of this one; its tasks may have succeeded, too.
  void OnDone(int process, int64_t id, bool is_over) {
    std::unique_lock<std::mutex> lock(mutex_);
    const MeetingPtr meeting = Find(process, id);
    if (meeting == nullptr) return;
    Meeting::Participant& its = meeting->participants.at(process);
    its.is_done = true;
    its.is_over |= is_over;
    FreeIfDone(meeting.get());
    if (meeting->phase == Phase::kEnding && meeting->All(&Meeting::Participant::is_over)) {
      EndWell(std::move(lock), meeting.get(), /*rank=*/-1);
    }
  }

  // Data that an ended process has staged can still be read; other data of it never arrives.
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
      if (!meeting->Misses(process)) continue;
      lost.try_emplace(meeting->key.run_id, Status::Internal(WhyLostTo(*meeting, process)),
                       meeting->deadline);
    }
    lock.unlock();
    for (const auto& [run_id, why] : lost) {
      FailAll(std::unique_lock<std::mutex>(mutex_), run_id, why.first, why.second, {});
    }
  }

  std::string WhyLostTo(const Meeting& meeting, int process) const {
    return WhyLost(meeting, process, links_->pid(process));
  }

  // ---- Deadlines.

  // Makes the watchdog look again by then. Called with the lock held.
  void WakeBy(Clock::time_point time) {
    if (time >= next_wake_) return;
    next_wake_ = time;
    wake_.notify_one();
  }

  void Watch() {
    const auto pid_of = [this](int process) { return links_->pid(process); };
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
        if (!meeting->IsLocal() && !std::exchange(meeting->is_overdue, true)) {
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

Exchanges& Instance() {
  static auto* exchanges = new Exchanges;
  return *exchanges;
}

}  // namespace

Transport& InProcessTransport() { return Instance(); }

Transport* SharedMemoryTransport() { return Instance().is_connected() ? &Instance() : nullptr; }

void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers) {
  if (!Instance().is_connected()) Instance().Connect(own, std::move(others), std::move(peers));
}

Transport& NewTransport(SharedSegment own, std::vector<SharedSegment> others,
                        std::vector<Peer> peers) {
  auto* exchanges = new Exchanges;
  exchanges->Connect(own, std::move(others), std::move(peers));
  return *exchanges;
}

}  // namespace cpd
