// The streams of ranks on GPUs: a schedule is recorded for all ranks, then the steps of those that
// this device holds are put on its streams, in an order in which no step waits for a later one.
//
// The host waits for nothing. Every process and every device puts the steps of one order on its
// streams, so that streams which the hardware runs one after another cannot hold each other up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gemm/overlap_problem.h"
#include "gpu_schedule/lt_product.h"
#include "transport/streams.h"
#include "transport/transport.h"

namespace cpd {

// A configuration as GPUs run it. Chunks are always copied, by a copy engine or a kernel, and one
// GEMM with a counter per chunk becomes a GEMM per chunk: the library has no such counters. The
// order of an atomic ring's chunks stays.
OverlapConfig OnGpus(OverlapConfig config);

// A number for what a call does: the same on ranks that make the same one, in every process.
uint64_t ProgramOf(const std::string& op, const OverlapProblem& problem);

// What decides which kernels a call launches on this device: besides its program, how products are
// computed there, and which operands its `num_local` ranks have, aligned to what.
std::vector<int64_t> KernelsOf(uint64_t program, const OverlapProblem& problem, int first_local,
                               int num_local, const LtOptions& options);

enum class Lane : uint8_t { kCompute, kCommunicate };

// What a team asks of a device. Steps go on the stream that was chosen last.
class GpuQueues {
 public:
  virtual ~GpuQueues() = default;

  virtual void Choose(int rank, Lane lane) = 0;
  virtual void Copy(const std::vector<RowCopy>& pieces) = 0;
  // A point on the stream, and a stream that goes on when it is reached.
  virtual int RecordEvent() = 0;
  virtual void WaitForEvent(int event) = 0;
  // Signals of ranks that are not on this device; each counts once a call.
  virtual void SignalPeer(int rank, int peer, int signal) = 0;
  virtual void WaitForPeer(int rank, int peer, int signal) = 0;
  virtual void BeginSpan(int rank, SpanKind kind, const std::string& name) = 0;
  virtual void EndSpan() = 0;
};

class OverlapTeam {
 public:
  // Ranks [first_local, first_local + num_local) are on this device.
  OverlapTeam(int num_ranks, int num_signals, int first_local, int num_local);
  ~OverlapTeam();

  RankStreams streams(int rank);

  // Puts everything on the device's streams. Fails only if the schedule could never end.
  Status Enqueue(const std::string& op, GpuQueues* queues);

 private:
  class RecordedStream;
  struct Step;
  struct SignalState;

  bool IsLocal(int rank) const { return rank >= first_local_ && rank < first_local_ + num_local_; }
  bool IsReady(int rank, const Step& step) const;
  void Put(int rank, Lane lane, const Step& step, GpuQueues* queues);
  void Add(int rank, Lane lane, const Step& step, GpuQueues* queues);
  SignalState& StateOf(int rank, int signal) const;

  const int num_ranks_, num_signals_, first_local_, num_local_;
  std::vector<std::unique_ptr<RecordedStream>> streams_;  // two per rank
  const std::unique_ptr<std::vector<SignalState>> signals_;
};

}  // namespace cpd
