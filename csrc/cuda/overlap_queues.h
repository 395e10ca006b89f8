// What overlapped products on a GPU run on: streams, events, signals, arithmetic and spans.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "gemm/comm_overlap.h"
#include "gpu_schedule/cublaslt.h"
#include "gpu_schedule/overlap_team.h"
#include "kernels/meeting.h"
#include "transport/team.h"
#include "transport/transport.h"

namespace cpd {

// ---- Recorded spans of ranks: events on their streams, read when recording ends.

// All functions are thread-safe. While recording, each device synchronizes once to relate its time
// to the host's clock.
class GpuSpans {
 public:
  static GpuSpans& Get() {
    static auto* spans = new GpuSpans;
    return *spans;
  }

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // Clears earlier spans.
  void Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    spans_.clear();
    clocks_.clear();
    enabled_ = true;
  }

  // Records an event on the stream. Returns the number that ends the span, or -1.
  // The times of `span` are set when recording ends.
  int Begin(RecordedSpan span, int device, cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!enabled_) return -1;
    if (clocks_.count(device) == 0) {
      lock.unlock();  // the other spans remain
      Clock clock{};
      if (cudaEventCreate(&clock.event) != cudaSuccess) return -1;
      cudaEventRecord(clock.event, stream);
      cudaEventSynchronize(clock.event);
      clock.host_ns = SteadyNanoseconds();
      lock.lock();
      clocks_[device] = clock;
    }
    Open open{std::move(span), device, nullptr, nullptr};
    if (cudaEventCreate(&open.begin) != cudaSuccess || cudaEventCreate(&open.end) != cudaSuccess) {
      return -1;
    }
    cudaEventRecord(open.begin, stream);
    spans_.push_back(std::move(open));
    return static_cast<int>(spans_.size()) - 1;
  }

  void End(int number, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (number >= 0 && number < static_cast<int>(spans_.size())) {
      cudaEventRecord(spans_[number].end, stream);
    }
  }

  // Waits for all recorded events. Times are on the host's monotonic clock.
  std::vector<RecordedSpan> Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    enabled_ = false;
    std::vector<RecordedSpan> read;
    for (Open& open : spans_) {
      const Clock& clock = clocks_[open.device];
      float start_ms = 0, duration_ms = 0;
      const bool is_read =
          cudaEventSynchronize(open.end) == cudaSuccess &&
          cudaEventElapsedTime(&start_ms, clock.event, open.begin) == cudaSuccess &&
          cudaEventElapsedTime(&duration_ms, open.begin, open.end) == cudaSuccess;
      cudaEventDestroy(open.begin);
      cudaEventDestroy(open.end);
      if (!is_read) continue;
      open.span.start_ns = clock.host_ns + static_cast<int64_t>(1e6 * start_ms);
      open.span.duration_ns = static_cast<int64_t>(1e6 * duration_ms);
      read.push_back(std::move(open.span));
    }
    for (auto& [device, clock] : clocks_) cudaEventDestroy(clock.event);
    cudaGetLastError();
    spans_.clear();
    clocks_.clear();
    return read;
  }

 private:
  struct Open {
    RecordedSpan span;
    int device;
    cudaEvent_t begin, end;
  };
  struct Clock {
    cudaEvent_t event;
    int64_t host_ns;
  };

  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<Open> spans_;
  std::map<int, Clock> clocks_;  // by device
};

// ---- The arithmetic of a schedule on GPUs: products by cuBLASLt, everything else by kernels.

// How kernels, copies and products share a device.
struct GpuShare {
  int num_blocks = 1;       // of a kernel that runs alone
  int num_comm_blocks = 1;  // of a kernel that runs next to a product
  bool use_copy_engine = true;
  LtOptions lt;
};

// Errors are stored until status() is called: schedules do not return any.
class GpuArithmetic final : public Arithmetic {
 public:
  GpuArithmetic(std::string op, int device, GpuShare share)
      : op_(std::move(op)), device_(device), share_(share) {}

  // Sets the stream and the scratch memory of a rank for the next operations.
  void Choose(cudaStream_t stream, const GemmScratch* scratch) {
    stream_ = stream;
    scratch_ = scratch;
  }

  void Multiply(const GemmTask& task) const override {
    if (task.m == 0 || task.n == 0 || !status_.ok()) return;
    const LtResources resources{device_, scratch_->lt, GemmScratch::kLtBytes, stream_};
    const auto epilogue = [&](const GemmTask& rows, const char* sums, int64_t pitch) {
      kernels::SumCall sum = CallOf({{sums},
                                     DataType::kF32,
                                     pitch,
                                     rows.m,
                                     rows.n,
                                     rows.epilogue.bias,
                                     rows.c,
                                     rows.c_type,
                                     rows.c_pitch});
      sum.gelu = rows.epilogue.gelu;
      sum.pre_gelu = rows.epilogue.pre_gelu;
      sum.gelu_input = rows.epilogue.gelu_input;
      Check(LaunchSum(sum, share_.num_blocks, stream_), "launching an epilogue");
    };
    const Status status = MultiplyWithLt(op_, task, share_.lt, resources, scratch_->sums, epilogue);
    if (status_.ok()) status_ = status;
  }

  void Sum(const SumTask& task) const override {
    Check(LaunchSum(CallOf(task), share_.num_comm_blocks, stream_), "launching a sum");
  }

  void Copy(const std::vector<RowCopy>& copies) const override {
    for (const RowCopy& copy : copies) {
      if (copy.num_rows == 0 || copy.row_bytes == 0) continue;
      const bool is_one = copy.num_rows == 1 ||
                          (copy.to_pitch == copy.row_bytes && copy.from_pitch == copy.row_bytes);
      if (is_one && !share_.use_copy_engine) {
        Check(LaunchCopy(copy.to, copy.from, copy.num_rows * copy.row_bytes, share_.num_comm_blocks,
                         stream_),
              "launching a copy");
      } else if (is_one) {
        Check(cudaMemcpyAsync(copy.to, copy.from, copy.num_rows * copy.row_bytes, cudaMemcpyDefault,
                              stream_),
              "copying");
      } else {
        Check(cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch, copy.row_bytes,
                                copy.num_rows, cudaMemcpyDefault, stream_),
              "copying rows");
      }
    }
  }

  void Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const override {
    if (num_rows == 0 || row_bytes == 0) return;
    Check(cudaMemset2DAsync(rows, pitch, 0, row_bytes, num_rows, stream_), "clearing rows");
  }

  // Computes only the bias gradient: Prepare() has already swizzled the scales.
  void Finish(const OverlapProblem& p, const RankMemory& memory, const char*) const override {
    if (memory.bias_grad == nullptr) return;
    kernels::ColumnsCall call{};
    call.num_columns = p.n;
    call.out = memory.bias_grad;
    call.out_type = p.output_type;
    if (p.fuse_gelu) {
      call.data = memory.output;
      call.type = p.output_type;
      call.by_row = p.n;
      call.by_column = 1;
      call.num_rows = p.m;
    } else {
      const Matrix rhs = WholeProduct(p, memory).b;
      call.data = rhs.data;
      call.type = rhs.type;
      call.scale = reinterpret_cast<const float*>(rhs.scales.data);
      call.by_row = rhs.transposed ? 1 : rhs.pitch;
      call.by_column = rhs.transposed ? rhs.pitch : 1;
      call.num_rows = p.k;
    }
    Check(LaunchColumns(call, share_.num_blocks, stream_), "launching a bias gradient");
  }

  // Transposes 8-bit operands so that the contracted dimension is contiguous, and swizzles block
  // scales. Changes the problem accordingly, for the local ranks from `first` on.
  void Prepare(OverlapProblem* problem, int first, const std::vector<GemmScratch>& scratch) const {
    OverlapProblem& p = *problem;
    for (size_t i = 0; i < scratch.size() && p.scaling != Scaling::kNone; ++i) {
      RankMemory& memory = p.ranks[first + i];
      if (p.scaling == Scaling::kBlocks) {
        const int64_t blocks = (p.k + Scales::kBlock - 1) / Scales::kBlock;
        const auto swizzle = [&](const char* scales, char* tiles, bool of_lhs, bool across,
                                 int64_t num_lines) {
          Check(LaunchSwizzle({scales, tiles, ScalesPitch(p, of_lhs), across, num_lines, blocks},
                              share_.num_blocks, stream_),
                "launching the order of scales");
        };
        swizzle(memory.lhs_scales, memory.lhs_swizzled, true, p.lhs_transposed, p.m);
        swizzle(memory.rhs_scales, memory.rhs_swizzled, false, !p.rhs_transposed, p.n);
        memory.lhs_scales = memory.lhs_swizzled;
        memory.rhs_scales = memory.rhs_swizzled;
      }
      if (!p.rhs_transposed) {
        Check(LaunchTranspose({memory.rhs, scratch[i].rhs, p.k, p.n}, share_.num_blocks, stream_),
              "launching a transpose");
        memory.rhs = scratch[i].rhs;
      }
      if (p.lhs_transposed) {
        Check(LaunchTranspose({memory.lhs, scratch[i].lhs, p.k, p.m}, share_.num_blocks, stream_),
              "launching a transpose");
        memory.lhs = scratch[i].lhs;
      }
    }
    if (p.scaling != Scaling::kNone) {
      p.rhs_transposed = true;
      p.lhs_transposed = false;
    }
  }

  const Status& status() const { return status_; }

  void Check(cudaError_t error, const char* what) const {
    const Status status = CudaStatus(error, op_, ": ", what);
    if (status_.ok()) status_ = status;
  }

 private:
  static kernels::SumCall CallOf(const SumTask& task) {
    kernels::SumCall sum{};
    sum.num_sources = static_cast<int>(task.sources.size());
    std::copy(task.sources.begin(), task.sources.end(), sum.sources);
    sum.type = task.type;
    sum.pitch = task.pitch;
    sum.num_rows = task.num_rows;
    sum.num_columns = task.num_columns;
    sum.bias = task.bias;
    sum.to = task.to;
    sum.to_type = task.to_type;
    sum.to_pitch = task.to_pitch;
    return sum;
  }

  const std::string op_;
  const int device_;
  const GpuShare share_;
  cudaStream_t stream_ = nullptr;
  const GemmScratch* scratch_ = nullptr;
  mutable Status status_;
};

// ---- A device's streams for overlapped products, in addition to the program's, and their events.

// What calls that share lanes have in common: the device, its ranks, and the priorities of GEMMs
// and of communication. 0 is the lowest priority; larger values are more urgent.
using LanesKey = std::tuple<int, int, int64_t, int64_t>;

// The streams of each local rank. Calls on one device take turns to enqueue their steps.
class Lanes {
 public:
  // The streams of this device with these priorities. Created on first use, and then kept.
  static Status Find(const std::string& op, const LanesKey& key, std::shared_ptr<Lanes>* lanes) {
    static auto& all_mutex = *new std::mutex;
    static auto& all = *new std::map<LanesKey, std::shared_ptr<Lanes>>;
    const auto& [device, num_local, gemm_priority, comm_priority] = key;
    std::lock_guard<std::mutex> lock(all_mutex);
    std::shared_ptr<Lanes>& found = all[key];
    if (found == nullptr) {
      auto made = std::make_shared<Lanes>();
      int lowest = 0, highest = 0;  // CUDA numbers priorities the other way around
      cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
      for (int i = 0; i < 2 * num_local && error == cudaSuccess; ++i) {
        const int64_t wanted = i % 2 == 0 ? gemm_priority : comm_priority;
        const auto priority =
            static_cast<int>(std::clamp<int64_t>(lowest - wanted, highest, lowest));
        made->streams_.emplace_back();
        error =
            cudaStreamCreateWithPriority(&made->streams_.back(), cudaStreamNonBlocking, priority);
      }
      if (error != cudaSuccess) {
        all.erase(key);
        return CudaStatus(error, op, ": making streams");
      }
      found = std::move(made);
    }
    *lanes = found;
    return Status::Ok();
  }

  cudaStream_t stream(int local, Lane lane) const {
    return streams_[2 * local + static_cast<int>(lane)];
  }
  const std::vector<cudaStream_t>& streams() const { return streams_; }

  // Event numbers start from 0 in each call.
  cudaError_t event(int number, cudaEvent_t* event) {
    while (static_cast<int>(events_.size()) <= number) {
      cudaEvent_t made = nullptr;
      const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
      if (error != cudaSuccess) return error;
      events_.push_back(made);
    }
    *event = events_[number];
    return cudaSuccess;
  }

  std::mutex mutex;  // held while a call enqueues its steps

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
};

// ---- The queues of one overlapped product on a device: CUDA streams and events, and signals
// between devices.

class OverlapQueues final : public GpuQueues {
 public:
  struct Call {
    std::string op;
    int device, group, first_rank;
    bool has_spans;
  };

  // `lanes` must be locked by the caller. `meeting` is that of this device's one rank, or nullptr
  // if all ranks are here.
  OverlapQueues(Call call, std::vector<GemmScratch> scratch, Lanes* lanes,
                GpuArithmetic* arithmetic, const kernels::Meeting* meeting)
      : call_(std::move(call)),
        scratch_(std::move(scratch)),
        lanes_(lanes),
        arithmetic_(arithmetic),
        meeting_(meeting) {}

  // All lanes start from the program's stream, which continues when they are done.
  void Fork(cudaStream_t stream) {
    const int event = num_events_++;
    Record(event, stream);
    for (cudaStream_t lane : lanes_->streams()) Wait(event, lane);
  }

  void Join(cudaStream_t stream) {
    for (cudaStream_t lane : lanes_->streams()) {
      const int event = num_events_++;
      Record(event, lane);
      Wait(event, stream);
    }
  }

  void Choose(int rank, Lane lane) override {
    const int local = rank - call_.first_rank;
    chosen_ = lanes_->stream(local, lane);
    arithmetic_->Choose(chosen_, &scratch_[local]);
  }

  void Copy(const std::vector<RowCopy>& copies) override { arithmetic_->Copy(copies); }

  int RecordEvent() override {
    Record(num_events_, chosen_);
    return num_events_++;
  }

  void WaitForEvent(int event) override { Wait(event, chosen_); }

  void SignalPeer(int, int peer, int signal) override {
    // After an error, nothing is signalled: no rank should read what was not computed.
    if (!arithmetic_->status().ok()) return;
    arithmetic_->Check(LaunchTell(*meeting_, peer, signal, chosen_), "launching a signal");
  }

  void WaitForPeer(int, int peer, int signal) override {
    arithmetic_->Check(LaunchWaitFor(*meeting_, peer, signal, chosen_), "launching a wait");
  }

  void BeginSpan(int rank, SpanKind kind, const std::string& name) override {
    if (!call_.has_spans) return;
    span_ = GpuSpans::Get().Begin({call_.op, call_.group, rank, kind, name, 0, 0}, call_.device,
                                  chosen_);
  }

  void EndSpan() override {
    if (call_.has_spans) GpuSpans::Get().End(span_, chosen_);
  }

 private:
  void Record(int event, cudaStream_t stream) {
    cudaEvent_t found = nullptr;
    arithmetic_->Check(lanes_->event(event, &found), "making an event");
    if (found) arithmetic_->Check(cudaEventRecord(found, stream), "recording an event");
  }

  void Wait(int event, cudaStream_t stream) {
    cudaEvent_t found = nullptr;
    arithmetic_->Check(lanes_->event(event, &found), "making an event");
    if (found) arithmetic_->Check(cudaStreamWaitEvent(stream, found, 0), "waiting for an event");
  }

  const Call call_;
  const std::vector<GemmScratch> scratch_;
  Lanes* const lanes_;
  GpuArithmetic* const arithmetic_;
  const kernels::Meeting* const meeting_;
  cudaStream_t chosen_ = nullptr;
  int num_events_ = 0;
  int span_ = -1;
};

// ---- Records the launches of a call once and discards them, before ranks wait for one another.
//
// A cuBLASLt kernel is loaded at its first launch. Loading may wait for the device, where a rank
// may be waiting for the one that loads. A recording loads the kernels and runs nothing.

// Puts all steps of a schedule on one stream, without the dependencies between streams.
class Rehearsal final : public GpuQueues {
 public:
  Rehearsal(GpuArithmetic* arithmetic, const GemmScratch* scratch)
      : arithmetic_(arithmetic), scratch_(scratch) {}

  // Loads what every call needs, then runs `launch` on a recorded stream. Does each once for these
  // kernels (see KernelsOf) on the current device.
  Status Run(const std::string& op, int device, const std::vector<int64_t>& kernels,
             const std::function<Status(cudaStream_t)>& launch) {
    Rehearsed& rehearsed = On(device);
    std::lock_guard<std::mutex> lock(rehearsed.mutex);
    if (rehearsed.kernels.count(kernels) > 0) return Status::Ok();
    Status status;
    if (!rehearsed.is_loaded) {
      status = CublasLt::Get().Prepare(op, device);
      if (status.ok()) status = CudaStatus(LoadProductKernels(), op, ": loading kernels");
      rehearsed.is_loaded = status.ok();
    }
    if (!status.ok()) return status;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t loaded = nullptr;
    arithmetic_->Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                       "making a stream");
    if (stream_ == nullptr) return arithmetic_->status();
    arithmetic_->Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "recording");
    status = arithmetic_->status();
    if (status.ok()) {
      status = launch(stream_);
      arithmetic_->Check(cudaStreamEndCapture(stream_, &graph), "recording");
    }
    if (graph) arithmetic_->Check(cudaGraphInstantiate(&loaded, graph, 0), "loading kernels");
    if (loaded) cudaGraphExecDestroy(loaded);
    if (graph) cudaGraphDestroy(graph);
    cudaStreamDestroy(stream_);
    if (status.ok()) status = arithmetic_->status();
    if (status.ok()) rehearsed.kernels.insert(kernels);
    return status;
  }

  void Choose(int, Lane) override { arithmetic_->Choose(stream_, scratch_); }
  void Copy(const std::vector<RowCopy>&) override {}
  int RecordEvent() override { return 0; }
  void WaitForEvent(int) override {}
  void SignalPeer(int, int, int) override {}
  void WaitForPeer(int, int, int) override {}
  void BeginSpan(int, SpanKind, const std::string&) override {}
  void EndSpan() override {}

 private:
  // One mutex per device: loading kernels for one does not block another.
  struct Rehearsed {
    std::mutex mutex;
    bool is_loaded = false;  // the library's handle, and this package's kernels
    std::set<std::vector<int64_t>> kernels;
  };
  static Rehearsed& On(int device) {
    static auto& mutex = *new std::mutex;
    static auto& devices = *new std::map<int, Rehearsed>;
    std::lock_guard<std::mutex> lock(mutex);
    return devices[device];
  }

  GpuArithmetic* const arithmetic_;
  const GemmScratch* const scratch_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace cpd
