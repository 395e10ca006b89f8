// The order in which tensor cores read block scales.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/gemm.h"

namespace cpd {

constexpr int64_t kLinesInTile = 128, kScalesInTile = 4;

// The scale of `line` and `block` is at data + line * pitch + block or, if `across`, at data +
// block * pitch + line.
struct BlockScales {
  const char* data;
  int64_t pitch;
  bool across;
};

// Tiles [ceil(num_lines / 128), ceil(num_blocks / 4), 512], padded with zeros. In a tile, the scale
// of a line and a block is at line % 32 * 16 + line / 32 * 4 + block.
void SwizzleScales(const BlockScales& scales, int64_t num_lines, int64_t num_blocks, char* tiles);

// ---- One overlapped GEMM: shapes, types, chunks, and the memory of its ranks.

enum class CommType : uint8_t { kNone, kReduceScatter, kAllGather };
enum class CommMethod : uint8_t { kNone, kBulk, kPipeline, kRingExchange };
enum class Scaling : uint8_t { kNone, kTensor, kBlocks };

// How a call communicates; part of the description of a registered buffer.
struct OverlapConfig {
  CommType type = CommType::kNone;
  CommMethod method = CommMethod::kNone;  // with a type: communicates before or after the GEMM
  int64_t num_splits = 4;                 // column chunks of the pipeline
  bool atomic = false;                    // one GEMM with a counter per chunk
  bool overlap_first_gemm = false;  // the pipeline reduces a chunk after the next chunk's GEMM
  bool aggregate = false;           // the ring moves two chunks at a time
  bool copies = true;  // the ring copies chunks; else the GEMM reads other ranks' operands

  bool is_bulk() const { return method == CommMethod::kBulk; }
  // Whether lhs is gathered: in bulk, another array is.
  bool gathers_lhs() const { return type == CommType::kAllGather && !is_bulk(); }
};

// Rows [num_batches, rows] that are spread over ranks: chunk q has the rows of rank q in every
// batch. Alone, a chunk has `capacity` rows per batch. Gathered chunks follow one another in every
// batch.
struct RowChunks {
  int64_t num_batches = 1;
  int64_t capacity = 0;
  std::vector<int64_t> counts;  // rows per batch

  int num_chunks() const { return static_cast<int>(counts.size()); }
  int64_t total() const;  // rows per batch, over all chunks
  // The start of each chunk in a batch, with the chunks in rank order or in another order.
  std::vector<int64_t> Offsets() const;
  std::vector<int64_t> Offsets(const std::vector<int>& order) const;
};

// Memory of one rank. Unused arrays are nullptr, and so are arrays of other processes that are not
// read.
struct RankMemory {
  const char* lhs = nullptr;
  const char* rhs = nullptr;
  const char* bias = nullptr;  // [n]
  const char* aux_in = nullptr;
  char* output = nullptr;
  char* aux_out = nullptr;
  char* buffer = nullptr;  // BufferBytes(): registered, or the workspace of the call
  // Scales of scaled operands: one float, or bytes with ScalesPitch(). The swizzled ones are in the
  // order of tensor cores, for lhs as it is multiplied.
  const char* lhs_scales = nullptr;
  const char* rhs_scales = nullptr;
  char* lhs_swizzled = nullptr;
  char* rhs_swizzled = nullptr;
  // For GELU: see Epilogue.
  const char* gelu_input = nullptr;
  char* pre_gelu_out = nullptr;
  char* bias_grad = nullptr;  // [n]; nullptr: not requested

  bool is_elsewhere = false;  // in another process: its memory can only be read
};

// One call. Row chunks are those of lhs (all-gather), of the output (reduce-scatter), or of the
// auxiliary array (bulk), which has `aux_width` columns.
//
//   all-gather:      lhs [B, capacity, k] -> output [B, total, n]; gathered lhs [B, total, k]
//   reduce-scatter:  lhs [B, total, k] -> output [B, capacity, n]
//   bulk:            lhs [m, k] -> output [m, n], and at the same time
//                    aux_in [B, capacity, width] -> aux_out [B, total, width], gathered; or
//                    aux_in [B, total, width] -> aux_out [B, capacity, width], summed
struct OverlapProblem {
  OverlapConfig config;
  RowChunks rows;
  int64_t m = 0, n = 0, k = 0;  // m: rows of the whole product
  int64_t aux_width = 0;
  DataType lhs_type = DataType::kOther, rhs_type = DataType::kOther, output_type = DataType::kOther,
           aux_type = DataType::kOther;
  DataType partial_type = DataType::kOther;  // type of the products that other ranks sum
  Scaling scaling = Scaling::kNone;
  bool fuse_gelu = false;
  bool lhs_transposed = false, rhs_transposed = false;
  // The atomic ring leaves the chunks of the output, and takes those of lhs, in the order in which
  // rank r processes them: r - 1, r - 2, ..., r.
  bool in_ring_order = false;
  // Whether aux_out of an all-gather is the gathered lhs: chunks then arrive there.
  bool gathers_to_aux = false;
  // Whether ranks share only their buffers, as on GPUs; `copies` is then true.
  bool shares_only_buffers = false;
  std::vector<RankMemory> ranks;

  int num_ranks() const { return rows.num_chunks(); }
};

// The whole product, without communication.
GemmTask WholeProduct(const OverlapProblem& problem, const RankMemory& memory);

// Writes the remaining results once the product is in the output: swizzled scales and the bias
// gradient (sums over rows of the output after GELU's derivative, else of rhs).
void FinishProduct(const OverlapProblem& problem, const RankMemory& memory, const char* lhs_scales);

// lhs at the address `data`, with its scales.
Matrix LhsOf(const OverlapProblem& problem, const char* data, const char* scales);

// Bytes between lines of an operand's block scales.
int64_t ScalesPitch(const OverlapProblem& problem, bool of_lhs);

// The bytes of a rank's buffer, a registered one or the workspace of a call; clamped to the largest
// integer of 63 bits. Python asks for the same number.
int64_t BufferBytes(const OverlapProblem& problem);
// The offset of the gathered scales in it: one float per chunk, or lines stored as the gathered
// rows are.
int64_t GatheredScalesOffset(const OverlapProblem& problem);
// Bytes of one rank's operands; lines of scales are padded.
int64_t OwnLhsRows(const OverlapProblem& problem);
int64_t ScalesBytes(const OverlapProblem& problem, bool of_lhs);

}  // namespace cpd
