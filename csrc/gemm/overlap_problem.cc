// The order in which tensor cores read block scales.
#include "gemm/overlap_problem.h"

#include <initializer_list>
#include <limits>
#include <numeric>

namespace cpd {

void SwizzleScales(const BlockScales& scales, int64_t num_lines, int64_t num_blocks, char* tiles) {
  for (int64_t first_line = 0; first_line < num_lines; first_line += kLinesInTile) {
    for (int64_t first_block = 0; first_block < num_blocks; first_block += kScalesInTile) {
      for (int64_t i = 0; i < kLinesInTile; ++i) {
        for (int64_t j = 0; j < kScalesInTile; ++j) {
          const int64_t line = first_line + i, block = first_block + j;
          const bool is_there = line < num_lines && block < num_blocks;
          const int64_t at =
              scales.across ? block * scales.pitch + line : line * scales.pitch + block;
          tiles[i % 32 * 16 + i / 32 * 4 + j] = is_there ? scales.data[at] : 0;
        }
      }
      tiles += kLinesInTile * kScalesInTile;
    }
  }
}

// ---- One overlapped GEMM: shapes, types, chunks, and the memory of its ranks.

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

// The product of nonnegative sizes, clamped to the largest integer of 63 bits.
int64_t ClampedProduct(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  bool is_too_large = false;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
    is_too_large |= __builtin_mul_overflow(product, size, &product);
  }
  return is_too_large ? std::numeric_limits<int64_t>::max() : product;
}

int64_t ClampedSum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

// Bytes of the block scales of one contracted line.
int64_t BlocksOfLine(int64_t k) {
  return RoundUp((k + Scales::kBlock - 1) / Scales::kBlock, kScalesInTile);
}

// Gathered rows; their scales follow, aligned.
int64_t GatheredBytes(const OverlapProblem& p) {
  const bool is_bulk = p.config.is_bulk();
  const int64_t bytes =
      ClampedProduct({p.rows.num_batches, p.rows.total(), is_bulk ? p.aux_width : p.k,
                      ElementBytes(is_bulk ? p.aux_type : p.lhs_type)});
  const bool is_aligned = p.scaling == Scaling::kNone || bytes > (int64_t{1} << 62);
  return is_aligned ? bytes : RoundUp(bytes, 64);
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
  if (of_lhs) return p.lhs_transposed ? RoundUp(p.m, kLinesInTile) : BlocksOfLine(p.k);
  return p.rhs_transposed ? BlocksOfLine(p.k) : RoundUp(p.n, kLinesInTile);
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
  const bool gathers = p.config.gathers_lhs();
  return gathers ? p.rows.num_batches * p.rows.capacity : p.m;
}

int64_t ScalesBytes(const OverlapProblem& p, bool of_lhs) {
  switch (p.scaling) {
    case Scaling::kNone: return 0;
    case Scaling::kTensor: return sizeof(float);
    case Scaling::kBlocks:
      return RoundUp(of_lhs ? OwnLhsRows(p) : p.n, kLinesInTile) *
             RoundUp(p.k / Scales::kBlock, kScalesInTile);
  }
  return 0;
}

int64_t BufferBytes(const OverlapProblem& p) {
  const bool is_ring = p.config.method == CommMethod::kRingExchange;
  const int64_t rows = ClampedProduct({p.rows.num_batches, p.rows.total()});
  if (p.config.is_bulk()) {  // else directly from operand to result
    return p.shares_only_buffers ? ClampedProduct({rows, p.aux_width, ElementBytes(p.aux_type)})
                                 : 0;
  }
  if (p.config.type == CommType::kReduceScatter) {
    const int64_t element = ElementBytes(p.partial_type);
    if (!is_ring) return ClampedProduct({rows, p.n, element});
    return p.config.copies ? ClampedProduct({2 * p.num_ranks() - 1, p.rows.num_batches,
                                             p.rows.capacity, p.n, element})
                           : 0;
  }
  const int64_t scales = p.scaling == Scaling::kTensor
                             ? ClampedProduct({p.num_ranks(), sizeof(float)})
                         : p.scaling == Scaling::kBlocks ? ClampedProduct({rows, BlocksOfLine(p.k)})
                                                         : 0;
  if (p.gathers_to_aux && !p.shares_only_buffers) return scales;  // the result receives the rows
  const bool copies = !is_ring || p.config.copies || p.config.aggregate || p.shares_only_buffers;
  return copies ? ClampedSum(GatheredBytes(p), scales) : 0;
}

int64_t GatheredScalesOffset(const OverlapProblem& p) {
  return p.gathers_to_aux && !p.shares_only_buffers ? 0 : GatheredBytes(p);
}

}  // namespace cpd
