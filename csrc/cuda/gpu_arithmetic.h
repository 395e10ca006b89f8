// The arithmetic of a schedule on GPUs: products by cuBLASLt, everything else by kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/arithmetic.h"
#include "gpu_schedule/cublaslt.h"
#include "gpu_schedule/gemm_scratch.h"

namespace cpd {

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

}  // namespace cpd
