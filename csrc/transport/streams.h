// The chunked part of the transport interface: puts, signals and asynchronous waits, in order on
// the streams of a rank. A schedule is first recorded for all ranks that have met, and then runs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace cpd {

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

// Each operation on a stream begins when the previous one is over. Nothing here blocks the caller.
class Stream {
 public:
  virtual ~Stream() = default;

  virtual void Run(SpanKind kind, std::string name, std::function<void(Counters&)> work) = 0;

  // Copies into memory of `peer`, then adds one to its signal: a stream that has waited for the
  // signal sees the whole copy.
  virtual void Put(std::string name, int peer, std::vector<RowCopy> copies, Signal signal) = 0;

  // Adds one to a signal of `peer`. If that is this rank, it is an event between its streams.
  virtual void Add(int peer, Signal signal) = 0;

  // Blocks the stream until this rank's signal has reached `count`. `peer` adds to it; messages
  // name it.
  virtual void Wait(Signal signal, int64_t count, int peer) = 0;
};

// An operation that has been recorded, and its arguments.
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

class RecordedStream final : public Stream {
 public:
  void Run(SpanKind kind, std::string name, std::function<void(Counters&)> work) override {
    steps.push_back({Step::Kind::kRun, kind, std::move(name), std::move(work)});
  }
  void Put(std::string name, int peer, std::vector<RowCopy> copies, Signal signal) override {
    steps.push_back({Step::Kind::kPut,
                     SpanKind::kCommunication,
                     std::move(name),
                     {},
                     std::move(copies),
                     peer,
                     std::move(signal)});
  }
  void Add(int peer, Signal signal) override {
    steps.push_back({Step::Kind::kAdd, {}, {}, {}, {}, peer, std::move(signal)});
  }
  void Wait(Signal signal, int64_t count, int peer) override {
    steps.push_back({Step::Kind::kWait, {}, {}, {}, {}, peer, std::move(signal), count});
  }

  std::vector<Step> steps;
};

// The two streams of a rank: one computes while the other communicates.
struct RankStreams {
  Stream& compute;
  Stream& communicate;
};

// The streams of all ranks of a schedule, which is recorded once, for CPUs, GPUs and stand-ins.
class RecordedSchedule {
 public:
  explicit RecordedSchedule(int num_ranks) : streams_(2 * num_ranks) {}

  RankStreams streams(int rank) { return {streams_[2 * rank], streams_[2 * rank + 1]}; }
  int num_streams() const { return static_cast<int>(streams_.size()); }
  // Of stream i, which is of rank i / 2: the even one computes.
  const std::vector<Step>& steps(int i) const { return streams_[i].steps; }

 private:
  std::vector<RecordedStream> streams_;
};

}  // namespace cpd
