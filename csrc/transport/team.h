// Streams of ranks: their interface, on threads, and recorded spans of what each rank did and when.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// ---- The chunked part of the transport interface: puts, signals and asynchronous waits, in order
// on the streams of a rank. A schedule is recorded for all ranks that have met, and then runs.

enum class SpanKind : uint8_t { kComputation, kCommunication };

// Rows of equal size; each starts `pitch` bytes after the previous one.
struct RowCopy {
  char* to;
  int64_t to_pitch;
  const char* from;
  int64_t from_pitch;
  int64_t num_rows;
  int64_t row_bytes;
};

// A counter of one rank. It starts at zero, and the rank's streams wait on it.
struct Signal {
  int index;
  std::string name;  // for messages: "chunk 3 from rank 2"
};

// For work that signals or waits in the middle, such as one GEMM with a counter per chunk.
class Counters {
 public:
  virtual ~Counters() = default;
  virtual void Add(int rank, const Signal& signal) = 0;
  // Blocks. Returns false if the wait failed: the work should then end.
  virtual bool WaitFor(const Signal& signal, int64_t count, int peer) = 0;
};

// An operation of a stream, and its arguments.
struct Step {
  enum class Kind : uint8_t { kRun, kPut, kAdd, kWait };

  Kind kind;
  SpanKind span = SpanKind::kCommunication;
  std::string name = {};
  std::function<void(Counters&)> work = {};
  std::vector<RowCopy> copies = {};
  int peer = 0;
  Signal signal = {};
  int64_t count = 1;
};

// Records operations, each of which begins when the previous one is over.
class Stream {
 public:
  void Run(SpanKind kind, std::string name, std::function<void(Counters&)> work) {
    steps.push_back({Step::Kind::kRun, kind, std::move(name), std::move(work)});
  }

  // Copies into memory of `peer`, then adds one to its signal: a stream that has waited for the
  // signal sees the whole copy.
  void Put(std::string name, int peer, std::vector<RowCopy> copies, Signal signal) {
    steps.push_back({Step::Kind::kPut,
                     SpanKind::kCommunication,
                     std::move(name),
                     {},
                     std::move(copies),
                     peer,
                     std::move(signal)});
  }

  // Adds one to a signal of `peer`. If that is this rank, it is an event between its streams.
  void Add(int peer, Signal signal) {
    steps.push_back({Step::Kind::kAdd, {}, {}, {}, {}, peer, std::move(signal)});
  }

  // Blocks the stream until this rank's signal has reached `count`. `peer` adds to it; messages
  // name it.
  void Wait(Signal signal, int64_t count, int peer) {
    steps.push_back({Step::Kind::kWait, {}, {}, {}, {}, peer, std::move(signal), count});
  }

  std::vector<Step> steps;
};

// The two streams of a rank: one computes while the other communicates.
struct RankStreams {
  Stream& compute;
  Stream& communicate;
};

// The streams of all ranks, recorded once, for CPUs, GPUs and stand-ins. Stream i is of rank i / 2:
// the even one computes.
struct Schedule {
  explicit Schedule(int num_ranks) : streams(2 * num_ranks) {}

  RankStreams of(int rank) { return {streams[2 * rank], streams[2 * rank + 1]}; }
  int num_ranks() const { return static_cast<int>(streams.size()) / 2; }

  std::vector<Stream> streams;
};

// ---- Recorded spans: what each rank did and when.

// The monotonic clock of all spans.
inline int64_t SteadyNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct RecordedSpan {
  std::string op;
  int group;
  int rank;
  SpanKind kind;
  std::string name;
  int64_t start_ns;
  int64_t duration_ns;
};

// All functions are thread-safe.
class SpanRecorder {
 public:
  static SpanRecorder& Get() {
    static auto* recorder = new SpanRecorder;  // never destroyed: streams may run during exit()
    return *recorder;
  }

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // Clears earlier spans.
  void Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    spans_.clear();
    enabled_ = true;
  }

  // Returns the spans in the order of their ends.
  std::vector<RecordedSpan> Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    enabled_ = false;
    return std::exchange(spans_, {});
  }

  void Record(RecordedSpan span) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (enabled_) spans_.push_back(std::move(span));
  }

 private:
  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<RecordedSpan> spans_;
};

// ---- Streams of ranks, each run on its own thread. For ranks of other processes, only their puts
// to local ranks run here: local ranks fetch those.

// How the bytes of a put reach the peer; tests replace it with a slow link.
using Link = std::function<void(const std::vector<RowCopy>&)>;

inline void CopyRows(const std::vector<RowCopy>& copies) {
  for (const RowCopy& copy : copies) {
    if (copy.to_pitch == copy.row_bytes && copy.from_pitch == copy.row_bytes) {
      std::memcpy(copy.to, copy.from, copy.num_rows * copy.row_bytes);
      continue;
    }
    for (int64_t i = 0; i < copy.num_rows; ++i) {
      std::memcpy(copy.to + i * copy.to_pitch, copy.from + i * copy.from_pitch, copy.row_bytes);
    }
  }
}

// The ranks of one call that have met. Its tasks wait for one another, so all of them must run at
// the same time.
class Team {
 public:
  // The call, for messages and spans, and how long its tasks wait.
  struct Call {
    std::string op;
    int group;
    std::chrono::milliseconds deadline;
  };

  Team(Call call, Schedule schedule, int num_signals, Link link = CopyRows,
       Elsewhere elsewhere = {})
      : call_(std::move(call)),
        num_signals_(num_signals),
        link_(std::move(link)),
        elsewhere_(std::move(elsewhere)),
        schedule_(std::move(schedule)) {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      counters_.push_back(std::make_unique<RankCounters>(this, rank, 2 * num_signals));
    }
  }

  // The streams that are not empty.
  std::vector<int> Tasks() const {
    std::vector<int> tasks;
    for (int i = 0; i < 2 * schedule_.num_ranks(); ++i) {
      const std::vector<Step>& steps = schedule_.streams[i].steps;
      const auto runs = [&](const Step& step) { return RunsHere(i / 2, step); };
      if (std::any_of(steps.begin(), steps.end(), runs)) tasks.push_back(i);
    }
    return tasks;
  }

  // Runs a stream to its end, or to the first failure of any rank.
  void Run(int task) {
    const int rank = task / 2;
    try {
      for (const Step& step : schedule_.streams[task].steps) {
        if (RunsHere(rank, step) && (!RunStep(rank, step) || !status().ok())) return;
      }
    } catch (const std::exception& error) {  // no memory: the others must not wait for it
      Fail(Status::Internal(call_.op, elsewhere_.Holds(rank) ? ": fetching from rank " : ": rank ",
                            rank, " threw ", error.what()));
    }
  }

  // Of all ranks; final when all tasks have ended.
  Status status() {
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

  // A rank elsewhere has added to a counter of a local rank. Ignores unknown ranks and counters.
  void Add(int rank, int counter) {
    const bool is_one = rank >= 0 && rank < static_cast<int>(counters_.size()) && counter >= 0 &&
                        counter < 2 * num_signals_;
    if (is_one) counters_[rank]->Count(counter);
  }

  // Ends all waiting. The first failure is reported.
  void Fail(Status status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!status_.ok()) return;  // the first failure is reported
      status_ = std::move(status);
    }
    for (auto& counters : counters_) counters->WakeToFail();
  }

 private:
  // The signals of one rank. The sender adds after its copy, under the lock that the waiting stream
  // takes.
  class RankCounters final : public Counters {
   public:
    RankCounters(Team* team, int rank, int num_counters)
        : team_(team), rank_(rank), counts_(num_counters, 0) {}

    void Add(int rank, const Signal& signal) override {
      if (team_->elsewhere_.Holds(rank)) {
        team_->elsewhere_.add(rank, signal.index);
      } else {
        team_->Add(rank, signal.index);
      }
    }

    void Count(int counter) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++counts_[counter];
      }
      changed_.notify_all();
    }

    bool WaitFor(const Signal& signal, int64_t count, int peer) override {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto is_over = [&] { return failed_ || counts_[signal.index] >= count; };
      if (!changed_.wait_for(lock, team_->call_.deadline, is_over)) {
        const Status late = Status::Of(
            StatusCode::kDeadlineExceeded, team_->call_.op, ": rank ", rank_, " waited ",
            team_->call_.deadline.count(), " ms for rank ", team_->NameOf(peer), ", signal '",
            signal.name, "': expected ", count, ", seen ", counts_[signal.index],
            ". The rank has arrived, but its part is not done: check whether it is stopped or the "
            "machine is overloaded, or pass a longer deadline.");
        lock.unlock();
        team_->Fail(late);
        return false;
      }
      return !failed_;
    }

    void WakeToFail() {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        failed_ = true;
      }
      changed_.notify_all();
    }

   private:
    Team* const team_;
    const int rank_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<int64_t> counts_;
    bool failed_ = false;
  };

  // Whether a step of `rank` runs in this process: of ranks elsewhere, their puts to local ranks.
  bool RunsHere(int rank, const Step& step) const {
    return !elsewhere_.Holds(rank) ||
           (step.kind == Step::Kind::kPut && !elsewhere_.Holds(step.peer));
  }

  // false: the stream ends here
  bool RunStep(int rank, const Step& step) {
    RankCounters& own = *counters_[rank];
    switch (step.kind) {
      case Step::Kind::kRun: Span(rank, step.span, step.name, [&] { step.work(own); }); return true;
      case Step::Kind::kPut: {
        // Processes do not write each other's memory: the peer is notified and fetches the rows.
        if (elsewhere_.Holds(step.peer)) {
          own.Add(step.peer, Fetchable(step.signal));
          return true;
        }
        RankCounters& copier = elsewhere_.Holds(rank) ? *counters_[step.peer] : own;
        std::string name = step.name;
        if (&copier != &own) {
          if (!copier.WaitFor(Fetchable(step.signal), 1, rank)) return false;
          name += " from rank " + std::to_string(rank);
        }
        Span(&copier == &own ? rank : step.peer, step.span, name, [&] { link_(step.copies); });
        copier.Add(step.peer, step.signal);
        return true;
      }
      case Step::Kind::kAdd: own.Add(step.peer, step.signal); return true;
      case Step::Kind::kWait: return own.WaitFor(step.signal, step.count, step.peer);
    }
    return false;
  }

  template <typename Work>
  void Span(int rank, SpanKind kind, const std::string& name, const Work& work) const {
    SpanRecorder& spans = SpanRecorder::Get();
    const int64_t start = spans.enabled() ? SteadyNanoseconds() : -1;
    work();
    if (start < 0) return;
    spans.Record({call_.op, call_.group, rank, kind, name, start, SteadyNanoseconds() - start});
  }

  // Each signal has a second counter: of its puts that their rank has staged, so that they can be
  // fetched.
  Signal Fetchable(const Signal& signal) const {
    return {num_signals_ + signal.index, signal.name};
  }

  std::string NameOf(int rank) const {
    const std::string number = std::to_string(rank);
    return elsewhere_.Holds(rank) ? number + " of " + elsewhere_.name(rank) : number;
  }

  const Call call_;
  const int num_signals_;
  const Link link_;
  const Elsewhere elsewhere_;
  const Schedule schedule_;
  std::mutex mutex_;
  Status status_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
};

}  // namespace cpd
