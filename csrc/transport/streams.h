// The chunked half of the transport interface: puts, signals and asynchronous waits, in order on
// the streams of a rank. A schedule is recorded first, for all ranks that have met, and then runs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cpd {

enum class SpanKind : uint8_t { kComputation, kCommunication };

// Rows of equal size, each `pitch` bytes after the one before.
struct RowCopy {
  char* to;
  int64_t to_pitch;
  const char* from;
  int64_t from_pitch;
  int64_t num_rows;
  int64_t row_bytes;
};

// A counter of one rank, which starts at zero and on which its streams wait.
struct Signal {
  int index;
  std::string name;  // for messages: "chunk 3 from rank 2"
};

// For work that signals or waits in the middle: one GEMM with a counter per chunk.
class Counters {
 public:
  virtual ~Counters() = default;
  virtual void Add(int rank, const Signal& signal) = 0;
  // Blocks. False if it was in vain: then the work should end.
  virtual bool WaitFor(const Signal& signal, int64_t count, int peer) = 0;
};

// What follows on a stream begins when what is before it is over. Nothing here blocks the caller.
class Stream {
 public:
  virtual ~Stream() = default;

  virtual void Run(SpanKind kind, std::string name, std::function<void(Counters&)> work) = 0;

  // Copies into memory of `peer`, then adds one to its signal: who has waited for that sees all
  // of the copy.
  virtual void Put(std::string name, int peer, std::vector<RowCopy> pieces, Signal signal) = 0;

  // Adds one to a signal of `peer`, which may be this rank: an event between its streams.
  virtual void Add(int peer, Signal signal) = 0;

  // Holds the stream up until this rank's signal has counted to `count`; `peer` is who adds to it,
  // for messages.
  virtual void Wait(Signal signal, int64_t count, int peer) = 0;
};

// The streams of one rank: one computes while the other communicates.
struct RankStreams {
  Stream& compute;
  Stream& communicate;
};

}  // namespace cpd
