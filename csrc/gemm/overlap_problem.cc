// What one overlapped product is: its shapes, types and chunks, and the memory of its ranks.
#include "gemm/overlap_problem.h"

#include <numeric>

#include "gemm/swizzle.h"

namespace cpd {
namespace {

int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

Scales ScalesOf(const OverlapProblem& p, bool of_lhs, const char* data) {
  Scales scales;
  if (p.scaling == Scaling::kNone) return scales;
  scales.data = data;
  scales.is_blocks = p.scaling == Scaling::kBlocks;
  scales.across_lines = of_lhs ? p.lhs_transposed : !p.rhs_transposed;
  scales.pitch = ScalesPitch(p, of_lhs);
  return scales;
}

Matrix RhsOf(const OverlapProblem& p, const RankMemory& memory) {
  return {memory.rhs, p.rhs_type, p.rhs_transposed ? p.k : p.n, p.rhs_transposed,
          ScalesOf(p, /*of_lhs=*/false, memory.rhs_scales)};
}

// Of all chunks of lhs; scales behind them are aligned.
int64_t GatheredLhsBytes(const OverlapProblem& p) {
  const int64_t bytes = p.rows.num_batches * p.rows.total() * p.k * ElementBytes(p.lhs_type);
  return p.scaling == Scaling::kNone ? bytes : RoundUp(bytes, 64);
}

int64_t GatheredScalesBytes(const OverlapProblem& p) {
  switch (p.scaling) {
    case Scaling::kNone:
      return 0;
    case Scaling::kTensor:
      return p.num_ranks() * static_cast<int64_t>(sizeof(float));
    case Scaling::kBlocks:
      return p.rows.num_batches * p.rows.total() * ScalesPitch(p, /*of_lhs=*/true);
  }
  return 0;
}

int64_t GatheredBytes(const OverlapProblem& p, bool copies) {
  if (p.shares_only_buffers) return GatheredLhsBytes(p) + GatheredScalesBytes(p);
  if (p.gathers_to_aux) return GatheredScalesBytes(p);  // the rows arrive in the result
  return copies ? GatheredLhsBytes(p) + GatheredScalesBytes(p) : 0;
}

template <typename Wide>
void SumBiasGradient(const OverlapProblem& p, const RankMemory& memory) {
  std::vector<Wide> sums(p.n);
  if (p.fuse_gelu) {
    AddRows(Matrix{memory.output, p.output_type, p.n}, p.m, p.n, sums.data());
  } else {
    AddRows(RhsOf(p, memory), p.k, p.n, sums.data());
  }
  StoreRow(p.output_type, sums.data(), {}, p.n, memory.bias_grad);
}

}  // namespace

int64_t ScalesPitch(const OverlapProblem& p, bool of_lhs) {
  const int64_t blocks = RoundUp((p.k + Scales::kBlock - 1) / Scales::kBlock, kScalesInTile);
  if (of_lhs) return p.lhs_transposed ? RoundUp(p.m, kLinesInTile) : blocks;
  return p.rhs_transposed ? blocks : RoundUp(p.n, kLinesInTile);
}

Matrix LhsOf(const OverlapProblem& p, const char* data, const char* scales) {
  return {data, p.lhs_type, p.lhs_transposed ? p.m : p.k, p.lhs_transposed,
          ScalesOf(p, /*of_lhs=*/true, scales)};
}

GemmTask WholeProduct(const OverlapProblem& p, const RankMemory& memory) {
  GemmTask task;
  task.m = p.m;
  task.n = p.n;
  task.k = p.k;
  task.a = LhsOf(p, memory.lhs, memory.lhs_scales);
  task.b = RhsOf(p, memory);
  task.c = memory.output;
  task.c_type = p.output_type;
  task.c_pitch = p.n;
  task.epilogue = {memory.bias, p.fuse_gelu, memory.pre_gelu_out, memory.gelu_input};
  return task;
}

void FinishProduct(const OverlapProblem& p, const RankMemory& memory, const char* lhs_scales) {
  if (memory.bias_grad) {
    const bool is_wide = AccumulationType(p.rhs_type) == DataType::kF64;
    (is_wide ? SumBiasGradient<double> : SumBiasGradient<float>)(p, memory);
  }
  if (p.scaling != Scaling::kBlocks) return;
  const int64_t blocks = (p.k + Scales::kBlock - 1) / Scales::kBlock;
  if (memory.lhs_swizzled) {
    SwizzleScales({lhs_scales, ScalesPitch(p, /*of_lhs=*/true), p.lhs_transposed}, p.m, blocks,
                  memory.lhs_swizzled);
  }
  if (memory.rhs_swizzled) {
    SwizzleScales({memory.rhs_scales, ScalesPitch(p, /*of_lhs=*/false), !p.rhs_transposed}, p.n,
                  blocks, memory.rhs_swizzled);
  }
}

int64_t RowChunks::total() const {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

std::vector<int64_t> RowChunks::Offsets() const {
  std::vector<int> order(counts.size());
  std::iota(order.begin(), order.end(), 0);
  return Offsets(order);
}

std::vector<int64_t> RowChunks::Offsets(const std::vector<int>& order) const {
  std::vector<int64_t> offsets(counts.size());
  int64_t next = 0;
  for (const int chunk : order) {
    offsets[chunk] = next;
    next += counts[chunk];
  }
  return offsets;
}

int64_t OwnLhsRows(const OverlapProblem& p) {
  const bool gathers =
      p.config.type == CommType::kAllGather && p.config.method != CommMethod::kBulk;
  return gathers ? p.rows.num_batches * p.rows.capacity : p.m;
}

int64_t ScalesBytes(const OverlapProblem& p, bool of_lhs) {
  switch (p.scaling) {
    case Scaling::kNone:
      return 0;
    case Scaling::kTensor:
      return sizeof(float);
    case Scaling::kBlocks:
      return RoundUp(of_lhs ? OwnLhsRows(p) : p.n, kLinesInTile) *
             RoundUp(p.k / Scales::kBlock, kScalesInTile);
  }
  return 0;
}

int64_t GatheredScalesOffset(const OverlapProblem& p) {
  return p.gathers_to_aux && !p.shares_only_buffers ? 0 : GatheredLhsBytes(p);
}

int64_t BufferBytes(const OverlapProblem& p) {
  const RowChunks& rows = p.rows;
  const int64_t whole = rows.num_batches * rows.total();
  switch (p.config.method) {
    case CommMethod::kPipeline:
      return whole * p.n * ElementBytes(p.partial_type);
    case CommMethod::kRingExchange:
      if (p.config.type == CommType::kReduceScatter) {
        const int64_t num_slots = p.config.copies ? 2 * p.num_ranks() - 1 : 0;
        return num_slots * rows.num_batches * rows.capacity * p.n * ElementBytes(p.partial_type);
      }
      return GatheredBytes(p, p.config.copies || p.config.aggregate);
    case CommMethod::kNone:
      if (p.config.type == CommType::kReduceScatter) {
        return whole * p.n * ElementBytes(p.partial_type);
      }
      return GatheredBytes(p, /*copies=*/true);
    case CommMethod::kBulk:
      if (p.shares_only_buffers) return whole * p.aux_width * ElementBytes(p.aux_type);
      return 0;  // from operand to result
  }
  return 0;
}

}  // namespace cpd
