// GEMMs that overlap with the communication of their operands or results: what every rank does, as
// a schedule on its streams.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gemm/gemm.h"
#include "transport/streams.h"

namespace cpd {

enum class CommType : uint8_t { kNone, kReduceScatter, kAllGather };
enum class CommMethod : uint8_t { kNone, kBulk, kPipeline, kRingExchange };

// How a call communicates; part of what the id of a buffer stands for.
struct OverlapConfig {
  CommType type = CommType::kNone;
  CommMethod method = CommMethod::kNone;  // with a type: one after the other, in one call
  int64_t num_splits = 4;                 // column chunks of the pipeline
  bool atomic = false;                    // one GEMM with a counter per chunk
  bool overlap_first_gemm = false;        // the pipeline reduces a chunk after the next one's GEMM
  bool aggregate = false;                 // the ring moves two chunks at a time
  bool copies = true;  // the ring copies chunks; else the GEMM itself reads and writes the peer's
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

// Memory of one rank. What a call has no use for is null.
struct RankMemory {
  const char* lhs = nullptr;
  const char* rhs = nullptr;
  const char* bias = nullptr;  // [n]
  const char* aux_in = nullptr;
  char* output = nullptr;
  char* aux_out = nullptr;
  char* buffer = nullptr;  // BufferBytes(): registered, or without overlap a workspace
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
  bool lhs_transposed = false, rhs_transposed = false;
  // The atomic ring leaves the chunks of the output, and takes those of lhs, in the order in which
  // rank r meets them: r - 1, r - 2, ..., r.
  bool in_ring_order = false;
  // Whether aux_out of an all-gather is the gathered lhs, and so the place where chunks arrive.
  bool gathers_to_aux = false;
  std::vector<RankMemory> ranks;

  int num_ranks() const { return rows.num_chunks(); }
};

// The product as a whole, without communication.
GemmTask WholeProduct(const OverlapProblem& problem, const RankMemory& memory);

// Bytes that a rank needs in its registered buffer.
int64_t BufferBytes(const OverlapProblem& problem);

class CommOverlapCore {
 public:
  CommOverlapCore(OverlapProblem problem, GemmFunction gemm);
  virtual ~CommOverlapCore() = default;

  // Puts what `rank` does on its streams.
  virtual void Record(int rank, RankStreams streams) const = 0;

  int num_signals() const;

 protected:
  // Signals of one rank. A chunk has arrived when its rows lie where chunks are gathered, or the
  // part that its rank adds to a sum is there; it has been computed, by a rank, when it can be sent
  // or read.
  Signal Arrived(int chunk) const;
  Signal Computed(int chunk, int by) const;

  // ---- The product and its chunks. Rows to multiply stand among the gathered ones, or alone.
  void MultiplyAll(int rank, char* output, DataType type, const char* bias) const;
  void MultiplyGathered(int rank, int chunk) const;
  void MultiplyAlone(int rank, int chunk, const char* lhs) const;
  void MultiplyGatheredPair(int rank, int chunk) const;       // chunk and chunk + 1
  void MultiplyPartial(int rank, int chunk, char* to) const;  // -> [B, capacity, n]
  void MultiplyColumns(int rank, int64_t begin, int64_t end, char* to) const;  // of [B, total, n]

  // ---- Communication.
  char* GatheredRows(int rank) const;  // [B, total, k] or aux_out [B, total, width]
  // The copies that bring `chunk` from `from`, alone or among the others, to a gathered array.
  std::vector<RowCopy> ToGathered(int chunk, const char* from, bool is_alone, char* to) const;
  // Rank's own rows to all ranks, itself included.
  void AllGather(int rank, Stream& stream) const;
  void WaitForAllChunks(int rank, Stream& stream) const;
  // output [B, capacity, n] = the rows of `rank` in `sources`, [B, rows_of_batch, n], summed in
  // that order, + bias; of the columns from begin to end.
  struct Sources {
    std::vector<const char*> first_rows;  // of batch 0
    int64_t rows_of_batch;
  };
  void Reduce(int rank, const Sources& sources, int64_t begin, int64_t end) const;
  Sources RowsOf(int rank, const std::vector<const char*>& whole) const;  // in [B, total, width]
  std::vector<const char*> Buffers() const;

  int num_column_chunks() const;  // of the pipeline: at most as many as there are columns
  int most_chunks() const;        // of rows or columns
  int Rank(int64_t rank) const;   // modulo the number of ranks
  int64_t width() const;          // columns of what is gathered or summed
  DataType summed_type() const;

  const OverlapProblem p_;
  const std::vector<int64_t> offsets_;  // of chunks in the order of the ranks

 private:
  std::vector<int64_t> RingOffsets(int rank) const;
  Matrix Lhs(const char* data) const;
  GemmTask Task(int rank) const;
  void MultiplyRows(int rank, int chunk, const char* lhs, int64_t first_row,
                    int64_t rows_of_batch) const;

  const GemmFunction gemm_;
};

// One after the other: gathers, then multiplies; or multiplies, then reduces.
class NoOverlap final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;
  void Record(int rank, RankStreams streams) const override;
};

// Collective: a rank reads what the others have computed. Bulk and pipeline.
class CommOverlapBase final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;
  void Record(int rank, RankStreams streams) const override;

 private:
  void RecordBulk(int rank, RankStreams streams) const;
  void RecordPipeline(int rank, RankStreams streams) const;
};

// Point to point: a rank puts chunks to one other at a time. Ring exchange.
class CommOverlapP2PBase final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;
  void Record(int rank, RankStreams streams) const override;

 private:
  void RecordAllGather(int rank, RankStreams streams) const;
  void RecordPairs(int rank, RankStreams streams) const;
  void RecordReduceScatter(int rank, RankStreams streams) const;
};

std::unique_ptr<CommOverlapCore> MakeCommOverlap(OverlapProblem problem, GemmFunction gemm);

}  // namespace cpd
