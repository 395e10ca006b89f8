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

BufferRoom RoomOf(const OverlapProblem& p) {
  BufferRoom room;
  room.config = p.config;
  room.num_ranks = p.num_ranks();
  room.rows = p.rows.num_batches * p.rows.total();
  room.slot_rows = p.rows.num_batches * p.rows.capacity;
  room.scaling = p.scaling;
  room.gathers_to_aux = p.gathers_to_aux;
  room.shares_only_buffers = p.shares_only_buffers;
  if (p.config.is_bulk()) {
    room.columns = p.aux_width;
    room.type = p.aux_type;
  } else if (p.config.type == CommType::kReduceScatter) {
    room.columns = p.n;
    room.type = p.partial_type;
  } else {
    room.columns = p.k;
    room.type = p.lhs_type;
  }
  return room;
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

int64_t BufferRoom::GatheredBytes() const {
  const int64_t bytes = ClampedProduct({rows, columns, ElementBytes(type)});
  const bool is_aligned = scaling == Scaling::kNone || bytes > (int64_t{1} << 62);
  return is_aligned ? bytes : RoundUp(bytes, 64);
}

int64_t BufferRoom::GatheredScalesBytes() const {
  switch (scaling) {
    case Scaling::kNone:
      return 0;
    case Scaling::kTensor:
      return ClampedProduct({num_ranks, sizeof(float)});
    case Scaling::kBlocks:
      return ClampedProduct({rows, BlocksOfLine(columns)});
  }
  return 0;
}

int64_t BufferRoom::Bytes() const {
  const int64_t element = ElementBytes(type);
  const bool is_ring = config.method == CommMethod::kRingExchange;
  if (config.is_bulk()) {  // else directly from operand to result
    return shares_only_buffers ? ClampedProduct({rows, columns, element}) : 0;
  }
  if (config.type == CommType::kReduceScatter) {
    if (!is_ring) return ClampedProduct({rows, columns, element});
    return config.copies ? ClampedProduct({2 * num_ranks - 1, slot_rows, columns, element}) : 0;
  }
  if (shares_only_buffers) return ClampedSum(GatheredBytes(), GatheredScalesBytes());
  if (gathers_to_aux) return GatheredScalesBytes();  // the result receives the rows
  const bool copies = !is_ring || config.copies || config.aggregate;
  return copies ? ClampedSum(GatheredBytes(), GatheredScalesBytes()) : 0;
}

int64_t GatheredScalesOffset(const OverlapProblem& p) {
  return p.gathers_to_aux && !p.shares_only_buffers ? 0 : RoomOf(p).GatheredBytes();
}

int64_t BufferBytes(const OverlapProblem& p) { return RoomOf(p).Bytes(); }

}  // namespace cpd
