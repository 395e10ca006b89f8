// The streams of ranks on GPUs. A schedule is recorded for all ranks; then the steps of this
// device's ranks are enqueued, in an order in which no step waits for a later one.
//
// The host never waits. Every process and device enqueues the steps in the same order, so streams
// that the hardware serializes cannot block each other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gemm/overlap_problem.h"
#include "gpu_schedule/cublaslt.h"
#include "transport/streams.h"
#include "transport/transport.h"

namespace cpd {

// The configuration for GPUs. Chunks are always copied, by a copy engine or a kernel. One GEMM with
// a counter per chunk becomes one GEMM per chunk: the library has no such counters. The order of an
// atomic ring's chunks stays.
OverlapConfig OnGpus(OverlapConfig config);

// A hash of a call's work: equal, in every process, on ranks that run the same call.
uint64_t ProgramOf(const std::string& op, const OverlapProblem& problem);

// Everything that decides which kernels a call launches on this device: its program, the settings
// of its products, and the presence and alignment of operands of its `num_local` ranks.
std::vector<int64_t> KernelsOf(uint64_t program, const OverlapProblem& problem, int first_local,
                               int num_local, const LtOptions& options);

enum class Lane : uint8_t { kCompute, kCommunicate };

// The interface of a team to a device. Steps go to the stream that was chosen last.
class GpuQueues {
 public:
  virtual ~GpuQueues() = default;

  virtual void Choose(int rank, Lane lane) = 0;
  virtual void Copy(const std::vector<RowCopy>& pieces) = 0;
  // Records a point on the stream; makes a stream wait for such a point.
  virtual int RecordEvent() = 0;
  virtual void WaitForEvent(int event) = 0;
  // Signals of ranks on other devices; each counts one per call.
  virtual void SignalPeer(int rank, int peer, int signal) = 0;
  virtual void WaitForPeer(int rank, int peer, int signal) = 0;
  virtual void BeginSpan(int rank, SpanKind kind, const std::string& name) = 0;
  virtual void EndSpan() = 0;
};

class OverlapTeam {
 public:
  // This device holds ranks [first_local, first_local + num_local).
  OverlapTeam(int num_ranks, int num_signals, int first_local, int num_local)
      : num_signals_(num_signals),
        first_local_(first_local),
        num_local_(num_local),
        schedule_(num_ranks),
        signals_(num_ranks * num_signals) {}

  RankStreams streams(int rank) { return schedule_.streams(rank); }

  // Enqueues everything on the device's streams. Fails only if the schedule would never end.
  Status Enqueue(const std::string& op, GpuQueues* queues);

 private:
  // A signal of one rank, as counted by the steps so far.
  struct SignalState {
    bool is_added = false;
    int by = 0;      // which rank added
    Lane by_lane{};  // and on which stream
    int event = -1;  // on this device; -1: the other rank is elsewhere
  };

  bool IsLocal(int rank) const { return rank >= first_local_ && rank < first_local_ + num_local_; }
  void Put(int rank, Lane lane, const Step& step, GpuQueues* queues);
  void Add(int rank, Lane lane, const Step& step, GpuQueues* queues);
  SignalState& StateOf(int rank, const Signal& signal) {
    return signals_[rank * num_signals_ + signal.index];
  }

  const int num_signals_, first_local_, num_local_;
  RecordedSchedule schedule_;
  std::vector<SignalState> signals_;
};

}  // namespace cpd
