// The streams of ranks on GPUs. A schedule is recorded for all ranks; then the steps of this
// device's ranks are enqueued, in an order in which no step waits for a later one.
//
// The host never waits. Every process and device enqueues the steps in the same order, so streams
// that the hardware serializes cannot block each other.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gemm/overlap_problem.h"
#include "gpu_schedule/cublaslt.h"
#include "transport/team.h"
#include "transport/transport.h"

namespace cpd {

// The configuration for GPUs. Chunks are always copied, by a copy engine or a kernel. One GEMM with
// a counter per chunk becomes one GEMM per chunk: the library has no such counters. The order of an
// atomic ring's chunks stays.
inline OverlapConfig OnGpus(OverlapConfig config) {
  config.copies = true;
  config.atomic = false;
  return config;
}

// A hash of a call's work: equal, in every process, on ranks that run the same call.
inline uint64_t ProgramOf(const std::string& op, const OverlapProblem& p) {
  std::string text = op;
  const auto add = [&](auto number) { text += "," + std::to_string(static_cast<int64_t>(number)); };
  add(p.config.type);
  add(p.config.method);
  add(p.config.num_splits);
  add(p.config.overlap_first_gemm);
  add(p.config.aggregate);
  add(p.rows.num_batches);
  add(p.rows.capacity);
  for (const int64_t count : p.rows.counts) add(count);
  for (const int64_t size : {p.m, p.n, p.k, p.aux_width}) add(size);
  for (const DataType type : {p.lhs_type, p.rhs_type, p.output_type, p.aux_type, p.partial_type}) {
    add(type);
  }
  add(p.scaling);
  add(p.fuse_gelu);
  add(p.lhs_transposed);
  add(p.rhs_transposed);
  add(p.in_ring_order);
  add(p.gathers_to_aux);
  return std::hash<std::string>{}(text);
}

// Everything that decides which kernels a call launches on this device: its program, the settings
// of its products, and the presence and alignment of operands of its `num_local` ranks.
inline std::vector<int64_t> KernelsOf(uint64_t program, const OverlapProblem& problem,
                                      int first_local, int num_local, const LtOptions& options) {
  std::vector<int64_t> kernels{
      static_cast<int64_t>(program), first_local,    num_local, options.tf32,
      options.use_split_accumulator, options.num_sms};
  for (int rank = first_local; rank < first_local + num_local; ++rank) {
    const RankMemory& memory = problem.ranks[rank];
    for (const char* operand :
         {memory.lhs, memory.rhs, memory.bias, memory.gelu_input,
          static_cast<const char*>(memory.output), static_cast<const char*>(memory.aux_out),
          static_cast<const char*>(memory.pre_gelu_out),
          static_cast<const char*>(memory.bias_grad)}) {
      kernels.push_back(operand ? AlignmentOf(operand) : 0);
    }
  }
  return kernels;
}

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
  OverlapTeam(Schedule schedule, int num_signals, int first_local, int num_local)
      : num_signals_(num_signals),
        first_local_(first_local),
        num_local_(num_local),
        schedule_(std::move(schedule)),
        signals_(schedule_.num_ranks() * num_signals) {}

  // Enqueues everything on the device's streams. Fails only if the schedule would never end.
  Status Enqueue(const std::string& op, GpuQueues* queues) {
    const auto num_streams = static_cast<int>(schedule_.streams.size());
    std::vector<size_t> next(num_streams);
    const auto step_of = [&](int i) -> const Step* {
      const std::vector<Step>& steps = schedule_.streams[i].steps;
      return next[i] < steps.size() ? &steps[next[i]] : nullptr;
    };
    for (bool moves = true; moves;) {
      moves = false;
      for (int i = 0; i < num_streams; ++i) {
        const Step* step = step_of(i);
        if (step == nullptr) continue;
        if (step->kind == Step::Kind::kWait && !StateOf(i / 2, step->signal).is_added) continue;
        Put(i / 2, i % 2 == 0 ? Lane::kCompute : Lane::kCommunicate, *step, queues);
        ++next[i];
        moves = true;
      }
    }
    for (int i = 0; i < num_streams; ++i) {
      const Step* step = step_of(i);
      if (step == nullptr) continue;
      return Status::Internal(op, ": rank ", i / 2, " waits for signal '", step->signal.name,
                              "' of rank ", step->peer, ", which no rank sends.");
    }
    return Status::Ok();
  }

 private:
  // Schedules for GPUs have one GEMM per chunk: nothing signals in the middle of a GEMM.
  class NoCounters final : public Counters {
   public:
    void Add(int, const Signal&) override {}
    bool WaitFor(const Signal&, int64_t, int) override { return true; }
  };

  // A signal of one rank, as counted by the steps so far.
  struct SignalState {
    bool is_added = false;
    int by = 0;      // which rank added
    Lane by_lane{};  // and on which stream
    int event = -1;  // on this device; -1: the other rank is elsewhere
  };

  bool IsLocal(int rank) const { return rank >= first_local_ && rank < first_local_ + num_local_; }

  void Put(int rank, Lane lane, const Step& step, GpuQueues* queues) {
    if (IsLocal(rank)) queues->Choose(rank, lane);
    switch (step.kind) {
      case Step::Kind::kRun: {
        if (!IsLocal(rank)) return;
        NoCounters none;
        queues->BeginSpan(rank, step.span, step.name);
        step.work(none);
        queues->EndSpan();
        return;
      }
      case Step::Kind::kPut:
        if (IsLocal(rank)) {
          queues->BeginSpan(rank, step.span, step.name);
          queues->Copy(step.copies);
          queues->EndSpan();
        }
        return Add(rank, lane, step, queues);
      case Step::Kind::kAdd: return Add(rank, lane, step, queues);
      case Step::Kind::kWait: {
        if (!IsLocal(rank)) return;
        const SignalState& state = StateOf(rank, step.signal);
        if (state.event < 0) {
          queues->WaitForPeer(rank, state.by, step.signal.index);
        } else if (state.by != rank || state.by_lane != lane) {
          queues->WaitForEvent(state.event);
        }
        return;
      }
    }
  }

  void Add(int rank, Lane lane, const Step& step, GpuQueues* queues) {
    SignalState& state = StateOf(step.peer, step.signal);
    state = {true, rank, lane};
    if (!IsLocal(rank)) return;
    if (IsLocal(step.peer)) {
      state.event = queues->RecordEvent();
    } else {
      queues->SignalPeer(rank, step.peer, step.signal.index);
    }
  }

  SignalState& StateOf(int rank, const Signal& signal) {
    return signals_[rank * num_signals_ + signal.index];
  }

  const int num_signals_, first_local_, num_local_;
  const Schedule schedule_;
  std::vector<SignalState> signals_;
};

}  // namespace cpd
