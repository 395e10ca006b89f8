// The streams of ranks on GPUs. A schedule is recorded for all ranks; then the steps of this
// device's ranks are enqueued, in an order in which no step waits for a later one.
#include "gpu_schedule/overlap_team.h"

#include <utility>

namespace cpd {

OverlapConfig OnGpus(OverlapConfig config) {
  config.copies = true;
  config.atomic = false;
  return config;
}

uint64_t ProgramOf(const std::string& op, const OverlapProblem& p) {
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

std::vector<int64_t> KernelsOf(uint64_t program, const OverlapProblem& problem, int first_local,
                               int num_local, const LtOptions& options) {
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

struct OverlapTeam::Step {
  enum class Kind { kRun, kPut, kAdd, kWait };

  Kind kind;
  SpanKind span = SpanKind::kComputation;
  std::string name = {};
  std::function<void(Counters&)> work = {};
  std::vector<RowCopy> pieces = {};
  int peer = 0;
  int signal = 0;
};

// A signal of one rank, as counted by the steps so far.
struct OverlapTeam::SignalState {
  bool is_added = false;
  int by = 0;      // which rank added
  Lane by_lane{};  // and on which stream
  int event = -1;  // on this device; -1: the other rank is elsewhere
};

namespace {

// Schedules for GPUs have one GEMM per chunk: nothing signals in the middle of a GEMM.
class NoCounters final : public Counters {
 public:
  void Add(int, const Signal&) override {}
  bool WaitFor(const Signal&, int64_t, int) override { return true; }
};

}  // namespace

class OverlapTeam::RecordedStream final : public Stream {
 public:
  void Run(SpanKind kind, std::string name, std::function<void(Counters&)> work) override {
    steps.push_back({Step::Kind::kRun, kind, std::move(name), std::move(work)});
  }
  void Put(std::string name, int peer, std::vector<RowCopy> pieces, Signal signal) override {
    steps.push_back({Step::Kind::kPut,
                     SpanKind::kCommunication,
                     std::move(name),
                     {},
                     std::move(pieces),
                     peer,
                     signal.index});
  }
  void Add(int peer, Signal signal) override {
    steps.push_back({Step::Kind::kAdd, {}, std::move(signal.name), {}, {}, peer, signal.index});
  }
  // Every signal of a schedule counts to one.
  void Wait(Signal signal, int64_t, int peer) override {
    steps.push_back({Step::Kind::kWait, {}, std::move(signal.name), {}, {}, peer, signal.index});
  }

  std::vector<Step> steps;
  size_t next = 0;
};

OverlapTeam::OverlapTeam(int num_ranks, int num_signals, int first_local, int num_local)
    : num_ranks_(num_ranks),
      num_signals_(num_signals),
      first_local_(first_local),
      num_local_(num_local),
      signals_(std::make_unique<std::vector<SignalState>>(num_ranks * num_signals)) {
  for (int i = 0; i < 2 * num_ranks; ++i) streams_.push_back(std::make_unique<RecordedStream>());
}

OverlapTeam::~OverlapTeam() = default;

RankStreams OverlapTeam::streams(int rank) {
  return {*streams_[2 * rank], *streams_[2 * rank + 1]};
}

OverlapTeam::SignalState& OverlapTeam::StateOf(int rank, int signal) const {
  return (*signals_)[rank * num_signals_ + signal];
}

bool OverlapTeam::IsReady(int rank, const Step& step) const {
  return step.kind != Step::Kind::kWait || StateOf(rank, step.signal).is_added;
}

void OverlapTeam::Add(int rank, Lane lane, const Step& step, GpuQueues* queues) {
  SignalState& state = StateOf(step.peer, step.signal);
  state = {true, rank, lane};
  if (!IsLocal(rank)) return;
  if (IsLocal(step.peer)) {
    state.event = queues->RecordEvent();
  } else {
    queues->SignalPeer(rank, step.peer, step.signal);
  }
}

void OverlapTeam::Put(int rank, Lane lane, const Step& step, GpuQueues* queues) {
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
        queues->Copy(step.pieces);
        queues->EndSpan();
      }
      return Add(rank, lane, step, queues);
    case Step::Kind::kAdd:
      return Add(rank, lane, step, queues);
    case Step::Kind::kWait: {
      if (!IsLocal(rank)) return;
      const SignalState& state = StateOf(rank, step.signal);
      if (state.event < 0) {
        queues->WaitForPeer(rank, state.by, step.signal);
      } else if (state.by != rank || state.by_lane != lane) {
        queues->WaitForEvent(state.event);
      }
      return;
    }
  }
}

Status OverlapTeam::Enqueue(const std::string& op, GpuQueues* queues) {
  for (bool moves = true; moves;) {
    moves = false;
    for (int i = 0; i < 2 * num_ranks_; ++i) {
      RecordedStream& stream = *streams_[i];
      if (stream.next == stream.steps.size()) continue;
      const Step& step = stream.steps[stream.next];
      if (!IsReady(i / 2, step)) continue;
      Put(i / 2, i % 2 == 0 ? Lane::kCompute : Lane::kCommunicate, step, queues);
      ++stream.next;
      moves = true;
    }
  }
  for (int i = 0; i < 2 * num_ranks_; ++i) {
    const RecordedStream& stream = *streams_[i];
    if (stream.next == stream.steps.size()) continue;
    const Step& step = stream.steps[stream.next];
    return Status::Internal(op, ": rank ", i / 2, " waits for signal '", step.name, "' of rank ",
                            step.peer, ", which no rank sends.");
  }
  return Status::Ok();
}

}  // namespace cpd
