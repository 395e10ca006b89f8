// The arithmetic of a schedule on GPUs: products by cuBLASLt, everything else by kernels.
#include "cuda/gpu_arithmetic.h"

#include <algorithm>

#include "cuda/product_kernels.h"
#include "cuda/status.h"
#include "gemm/swizzle.h"
#include "gpu_schedule/lt_gemm.h"

namespace cpd {

namespace {

kernels::SumCall CallOf(const SumTask& task) {
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

}  // namespace

void GpuArithmetic::Check(cudaError_t error, const char* what) const {
  const Status status = CudaStatus(error, op_, ": ", what);
  if (status_.ok()) status_ = status;
}

void GpuArithmetic::Multiply(const GemmTask& task) const {
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

void GpuArithmetic::Sum(const SumTask& task) const {
  Check(LaunchSum(CallOf(task), share_.num_comm_blocks, stream_), "launching a sum");
}

void GpuArithmetic::Copy(const std::vector<RowCopy>& copies) const {
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

void GpuArithmetic::Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const {
  if (num_rows == 0 || row_bytes == 0) return;
  Check(cudaMemset2DAsync(rows, pitch, 0, row_bytes, num_rows, stream_), "clearing rows");
}

void GpuArithmetic::Finish(const OverlapProblem& p, const RankMemory& memory, const char*) const {
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

void GpuArithmetic::Prepare(OverlapProblem* problem, int first,
                            const std::vector<GemmScratch>& scratch) const {
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

}  // namespace cpd
