// Recorded spans of ranks on GPUs: events on their streams, read when recording ends.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gemm/comm_overlap.h"
#include "gpu_schedule/cublaslt.h"
#include "gpu_schedule/overlap_team.h"
#include "kernels/meeting.h"
#include "transport/team.h"
#include "transport/transport.h"

namespace cpd {

// All functions are thread-safe. While recording, each device synchronizes once to relate its time
// to the host's clock. Calls in a recorded command buffer have no spans.
class GpuSpans {
 public:
  static GpuSpans& Get();

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Start();  // clears earlier spans

  // Records an event on the stream. Returns the number that ends the span, or -1.
  // The times of `span` are set when recording ends.
  int Begin(RecordedSpan span, int device, cudaStream_t stream);
  void End(int number, cudaStream_t stream);

  // Waits for all recorded events. Times are on the host's monotonic clock.
  std::vector<RecordedSpan> Stop();

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

  void Multiply(const GemmTask& task) const override;
  void Sum(const SumTask& task) const override;
  void Copy(const std::vector<RowCopy>& copies) const override;
  void Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const override;
  // Computes only the bias gradient: Prepare() has already swizzled the scales.
  void Finish(const OverlapProblem& problem, const RankMemory& memory,
              const char* lhs_scales) const override;

  // Transposes 8-bit operands so that the contracted dimension is contiguous, and swizzles block
  // scales. Changes the problem accordingly, for the local ranks from `first` on.
  void Prepare(OverlapProblem* problem, int first, const std::vector<GemmScratch>& scratch) const;

  const Status& status() const { return status_; }
  void Check(cudaError_t error, const char* what) const;

 private:
  const std::string op_;
  const int device_;
  const GpuShare share_;
  cudaStream_t stream_ = nullptr;
  const GemmScratch* scratch_ = nullptr;
  mutable Status status_;
};

// ---- A device's streams for overlapped products, in addition to the program's, and their events.

// What calls that share lanes have in common. 0 is the lowest priority; larger values are more
// urgent.
struct LanesKey {
  int device, num_local;
  int64_t gemm_priority, comm_priority;
};

// The streams of each local rank. Calls on one device take turns to enqueue their steps.
class Lanes {
 public:
  // The streams of this device with these priorities. Created on first use, but not while a stream
  // is being recorded, and then kept. Calls that are being recorded have separate ones: from their
  // first step until XLA ends its recording, all that reaches these streams is recorded.
  static Status Find(const std::string& op, const LanesKey& key, bool is_recorded,
                     std::shared_ptr<Lanes>* lanes);

  // Waits on the host until no other recording than that of `stream` uses these streams; fails
  // after 10 s. Call with the mutex held.
  Status WaitForRecording(const std::string& op, cudaStream_t stream) const;

  cudaStream_t stream(int local, Lane lane) const {
    return streams_[2 * local + static_cast<int>(lane)];
  }
  const std::vector<cudaStream_t>& streams() const { return streams_; }

  // Event numbers start from 0 in each call.
  cudaError_t event(int number, cudaEvent_t* event);

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
                GpuArithmetic* arithmetic, const kernels::Meeting* meeting);

  // All lanes start from the program's stream, which continues when they are done.
  void Fork(cudaStream_t stream);
  void Join(cudaStream_t stream);

  void Choose(int rank, Lane lane) override;
  void Copy(const std::vector<RowCopy>& copies) override { arithmetic_->Copy(copies); }
  int RecordEvent() override;
  void WaitForEvent(int event) override;
  void SignalPeer(int rank, int peer, int signal) override;
  void WaitForPeer(int rank, int peer, int signal) override;
  void BeginSpan(int rank, SpanKind kind, const std::string& name) override;
  void EndSpan() override;

 private:
  void Record(int event, cudaStream_t stream);
  void Wait(int event, cudaStream_t stream);

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
// may be waiting for the one that loads; and nothing should be loaded while XLA records a program.
// A recording loads the kernels and runs nothing.

// Puts all steps of a schedule on one stream, without the dependencies between streams.
class Rehearsal final : public GpuQueues {
 public:
  Rehearsal(GpuArithmetic* arithmetic, const GemmScratch* scratch)
      : arithmetic_(arithmetic), scratch_(scratch) {}

  // Loads what every call needs, then runs `launch` on a recorded stream. Does each once for these
  // kernels (see KernelsOf) on the current device.
  Status Run(const std::string& op, int device, const std::vector<int64_t>& kernels,
             const std::function<Status(cudaStream_t)>& launch);

  void Choose(int, Lane) override { arithmetic_->Choose(stream_, scratch_); }
  void Copy(const std::vector<RowCopy>&) override {}
  int RecordEvent() override { return 0; }
  void WaitForEvent(int) override {}
  void SignalPeer(int, int, int) override {}
  void WaitForPeer(int, int, int) override {}
  void BeginSpan(int, SpanKind, const std::string&) override {}
  void EndSpan() override {}

 private:
  GpuArithmetic* const arithmetic_;
  const GemmScratch* const scratch_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace cpd
