// One call of the GEMM handler on a GPU: its attributes, its arrays rank by rank, and the problem
// they describe. Needs no CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/cuda/dispatch_call.h"
#include "ffi/gemm_call.h"
#include "gpu_schedule/cublaslt.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// The device table is a single -1 also without communication.
struct CudaGemmOptions : GpuOptions {
  GemmOptions call;
  int64_t gemm_priority, comm_priority;
  bool set_sm_margin;
  bool tf32;
  bool use_split_accumulator;  // of 8-bit operands: sums in float32, as the CPU always does

  bool overlaps() const { return call.comm_type != 0; }
  int64_t num_ranks() const { return overlaps() ? call.num_ranks : 1; }
  std::string op() const;
};

Status ReadOptions(const xla::ffi::Dictionary& attributes, CudaGemmOptions* options);

// The array of one rank within an array of all ranks, whose first dimension is the rank.
class BufferView {
 public:
  BufferView(const xla::ffi::AnyBuffer& all, int64_t rank, int64_t num_ranks);

  xla::ffi::AnyBuffer get() const { return xla::ffi::AnyBuffer(raw_.get()); }

 private:
  std::vector<int64_t> dims_;
  std::unique_ptr<XLA_FFI_Buffer> raw_;
};

// One call, with its memory on this device.
struct CudaGemmCall {
  std::vector<BufferView> views;     // own the shapes of `buffers` if there are several ranks
  std::vector<GemmBuffers> buffers;  // of each local rank
  OverlapProblem problem;            // without memory
  std::vector<GemmScratch> scratch;  // of each local rank, in memory from XLA
};

// Checks the number of ranks against the GPU limit, before anything is created for them.
Status CheckRanksOnGpu(const std::string& op, const CudaGemmOptions& options);

// Reads the arrays and the problem that they and the attributes describe. `has_all_ranks`: arrays
// have a first dimension of ranks. Rejects invalid calls, and those beyond the GPU limits.
Status ReadGemmCall(const std::string& op, const CudaGemmOptions& options,
                    const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& results,
                    bool has_all_ranks, CudaGemmCall* call);

}  // namespace cpd
