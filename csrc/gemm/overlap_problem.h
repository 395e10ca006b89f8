// What one overlapped product is: its shapes, types and chunks, and the memory of its ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/gemm.h"

namespace cpd {

enum class CommType : uint8_t { kNone, kReduceScatter, kAllGather };
enum class CommMethod : uint8_t { kNone, kBulk, kPipeline, kRingExchange };
enum class Scaling : uint8_t { kNone, kTensor, kBlocks };

// How a call communicates; part of what the id of a buffer stands for.
struct OverlapConfig {
  CommType type = CommType::kNone;
  CommMethod method = CommMethod::kNone;  // with a type: one after the other, in one call
  int64_t num_splits = 4;                 // column chunks of the pipeline
  bool atomic = false;                    // one GEMM with a counter per chunk
  bool overlap_first_gemm = false;        // the pipeline reduces a chunk after the next one's GEMM
  bool aggregate = false;                 // the ring moves two chunks at a time
  bool copies = true;  // the ring copies chunks; else the GEMM itself reads the operands of others
};

// Rows [num_batches, rows] that are spread over ranks: chunk q are the rows of rank q, in every
// batch. Alone, a chunk has room for `capacity` rows a batch; together, the chunks stand one after
// another in every batch.
struct RowChunks {
  int64_t num_batches = 1;
  int64_t capacity = 0;
  std::vector<int64_t> counts;  // rows a batch

  int num_chunks() const { return static_cast<int>(counts.size()); }
  int64_t total() const;  // rows a batch, of all chunks
  // Where each chunk begins in a batch, with the chunks in the order of the ranks or in another.
  std::vector<int64_t> Offsets() const;
  std::vector<int64_t> Offsets(const std::vector<int>& order) const;
};

// Memory of one rank. What a call has no use for is null, and so is what ranks of another process
// do not read.
struct RankMemory {
  const char* lhs = nullptr;
  const char* rhs = nullptr;
  const char* bias = nullptr;  // [n]
  const char* aux_in = nullptr;
  char* output = nullptr;
  char* aux_out = nullptr;
  char* buffer = nullptr;  // BufferBytes(): registered, or a workspace of the call
  // Of scaled operands: one float, or bytes in lines of ScalesPitch(); and the latter as tensor
  // cores read them, of lhs as it is multiplied.
  const char* lhs_scales = nullptr;
  const char* rhs_scales = nullptr;
  char* lhs_swizzled = nullptr;
  char* rhs_swizzled = nullptr;
  // Of GELU: see Epilogue.
  const char* gelu_input = nullptr;
  char* pre_gelu_out = nullptr;
  char* bias_grad = nullptr;  // [n]; null: not asked for

  bool is_elsewhere = false;  // in another process: what there is of it can only be read
};

// One call. Row chunks are those of lhs (all-gather), of the output (reduce-scatter), or of the
// auxiliary array (bulk), which is `aux_width` wide.
//
//   all-gather:      lhs [B, capacity, k] -> output [B, total, n]; gathered lhs [B, total, k]
//   reduce-scatter:  lhs [B, total, k] -> output [B, capacity, n]
//   bulk:            lhs [m, k] -> output [m, n], and beside it
//                    aux_in [B, capacity, width] -> aux_out [B, total, width], gathered; or
//                    aux_in [B, total, width] -> aux_out [B, capacity, width], summed
struct OverlapProblem {
  OverlapConfig config;
  RowChunks rows;
  int64_t m = 0, n = 0, k = 0;  // m: of the whole product
  int64_t aux_width = 0;
  DataType lhs_type = DataType::kOther, rhs_type = DataType::kOther, output_type = DataType::kOther,
           aux_type = DataType::kOther;
  DataType partial_type = DataType::kOther;  // of products that other ranks sum
  Scaling scaling = Scaling::kNone;
  bool fuse_gelu = false;
  bool lhs_transposed = false, rhs_transposed = false;
  // The atomic ring leaves the chunks of the output, and takes those of lhs, in the order in which
  // rank r meets them: r - 1, r - 2, ..., r.
  bool in_ring_order = false;
  // Whether aux_out of an all-gather is the gathered lhs, and so the place where chunks arrive.
  bool gathers_to_aux = false;
  // Whether ranks reach nothing of each other but buffers, as on GPUs; `copies` is set then.
  bool shares_only_buffers = false;
  std::vector<RankMemory> ranks;

  int num_ranks() const { return rows.num_chunks(); }
};

// The product as a whole, without communication.
GemmTask WholeProduct(const OverlapProblem& problem, const RankMemory& memory);

// What is left to write when a product stands in the output: the gradient of the bias (sums over
// rows of the output of GELU's derivative, else of rhs), swizzled scales.
void FinishProduct(const OverlapProblem& problem, const RankMemory& memory, const char* lhs_scales);

// lhs that lies at `data` instead of its own place, with its scales.
Matrix LhsOf(const OverlapProblem& problem, const char* data, const char* scales);

// Bytes from one line of an operand's block scales to the next.
int64_t ScalesPitch(const OverlapProblem& problem, bool of_lhs);

// What a rank's buffer has room for: a registered one, or a workspace of the call.
struct BufferRoom {
  OverlapConfig config;
  int64_t num_ranks = 0;
  int64_t rows = 0;       // that move, of all ranks and batches
  int64_t slot_rows = 0;  // of the rank that has most of them
  int64_t columns = 0;
  DataType type = DataType::kOther;
  Scaling scaling = Scaling::kNone;
  bool gathers_to_aux = false, shares_only_buffers = false;  // see OverlapProblem

  // Gathered rows, and behind them, aligned, their scales: one float per rank, or lines of blocks.
  int64_t GatheredBytes() const;
  int64_t GatheredScalesBytes() const;
  // All of it; the largest number where that is beyond 63 bits. Python asks for as many.
  int64_t Bytes() const;
};

// Bytes that a rank needs in its buffer; and where in it scales are gathered, one float per chunk
// or lines like the gathered rows.
int64_t BufferBytes(const OverlapProblem& problem);
// Of one rank's operands, as they lie; lines of scales are padded.
int64_t OwnLhsRows(const OverlapProblem& problem);
int64_t ScalesBytes(const OverlapProblem& problem, bool of_lhs);
int64_t GatheredScalesOffset(const OverlapProblem& problem);

}  // namespace cpd
