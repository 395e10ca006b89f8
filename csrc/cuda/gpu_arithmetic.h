// What a schedule computes, put on the stream of a GPU: products by cuBLASLt, the rest by kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/arithmetic.h"
#include "gpu_schedule/cublaslt.h"
#include "gpu_schedule/gemm_scratch.h"

namespace cpd {

// How kernels and copies share a device with products.
struct GpuShare {
  int num_blocks = 1;       // of a kernel that has the device to itself
  int num_comm_blocks = 1;  // of a kernel beside a product
  bool use_copy_engine = true;
  LtOptions lt;
};

// Errors are kept until they are asked for: schedules have none.
class GpuArithmetic final : public Arithmetic {
 public:
  GpuArithmetic(std::string op, int device, GpuShare share)
      : op_(std::move(op)), device_(device), share_(share) {}

  // What follows goes on this stream, for a rank with this scratch.
  void Choose(cudaStream_t stream, const GemmScratch* scratch) {
    stream_ = stream;
    scratch_ = scratch;
  }

  void Multiply(const GemmTask& task) const override;
  void Sum(const SumTask& task) const override;
  void Copy(const std::vector<RowCopy>& pieces) const override;
  void Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const override;
  // The bias's gradient; scales lie as tensor cores read them before they are multiplied.
  void Finish(const OverlapProblem& problem, const RankMemory& memory,
              const char* lhs_scales) const override;

  // Lays 8-bit operands along what is contracted, and block scales as tensor cores read them:
  // changes the problem, of the local ranks from `first` on.
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

}  // namespace cpd
