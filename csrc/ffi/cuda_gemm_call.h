// One call of the GEMM handler on a GPU: its attributes, and its arrays rank by rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "ffi/cuda_call.h"
#include "ffi/gemm_call.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// Those of the CPU, and what GPUs are told besides.
struct CudaGemmOptions {
  GemmOptions call;
  Counts places;            // see CudaOptions; one of -1 also where there is no communication
  std::string_view memory;  // "devices" of this process, or a "slab" per process
  int64_t gemm_priority, comm_priority;
  int64_t num_comm_sm;
  bool set_sm_margin;
  bool tf32;
};

// False: an attribute is missing, or of another type.
bool ReadGemmOptions(const xla::ffi::Dictionary& attributes, CudaGemmOptions* options);

// The array of one rank among those of all ranks, which have a dimension of ranks before theirs.
class BufferView {
 public:
  BufferView(const xla::ffi::AnyBuffer& all, int64_t rank, int64_t num_ranks);

  xla::ffi::AnyBuffer get() const { return xla::ffi::AnyBuffer(raw_.get()); }

 private:
  std::vector<int64_t> dims_;
  std::unique_ptr<XLA_FFI_Buffer> raw_;
};

// The arrays of each local rank; with `has_rank_dim` through views, which they live as long as.
bool ReadGemmBuffers(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& results,
                     int64_t num_local, bool has_rank_dim, std::vector<BufferView>* views,
                     std::vector<GemmBuffers>* buffers);

}  // namespace cpd
