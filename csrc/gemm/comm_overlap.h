// The arithmetic of a schedule: on CPU it runs at once, on the calling threads; on GPUs it is
// enqueued on the stream of the current step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "transport/streams.h"

namespace cpd {

// to [num_rows, num_columns] = the sum of the sources in order, + bias, rounded once. All sources
// have the same layout; pitches count elements.
struct SumTask {
  std::vector<const char*> sources;
  DataType type = DataType::kOther;
  int64_t pitch = 0;
  int64_t num_rows = 0, num_columns = 0;
  const char* bias = nullptr;  // [num_columns], with the type of `to`
  char* to = nullptr;
  DataType to_type = DataType::kOther;
  int64_t to_pitch = 0;
};

class Arithmetic {
 public:
  virtual ~Arithmetic() = default;

  virtual void Multiply(const GemmTask& task) const = 0;
  virtual void Sum(const SumTask& task) const = 0;
  virtual void Copy(const std::vector<RowCopy>& copies) const = 0;
  // Fills rows of `row_bytes` with zeros; each starts `pitch` bytes after the previous one.
  virtual void Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const = 0;
  // See FinishProduct().
  virtual void Finish(const OverlapProblem& problem, const RankMemory& memory,
                      const char* lhs_scales) const = 0;
};

// Arithmetic on CPU; `gemm` computes the products.
class HostArithmetic final : public Arithmetic {
 public:
  explicit HostArithmetic(GemmFunction gemm) : gemm_(std::move(gemm)) {}

  void Multiply(const GemmTask& task) const override { gemm_(task); }
  void Sum(const SumTask& task) const override;
  void Copy(const std::vector<RowCopy>& copies) const override;
  void Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const override;
  void Finish(const OverlapProblem& problem, const RankMemory& memory,
              const char* lhs_scales) const override {
    FinishProduct(problem, memory, lhs_scales);
  }

 private:
  const GemmFunction gemm_;
};

// ---- GEMMs that overlap with the communication of their operands or results: the work of every
// rank, as a schedule on its streams.

class CommOverlapCore {
 public:
  CommOverlapCore(OverlapProblem problem, std::shared_ptr<Arithmetic> arithmetic);
  virtual ~CommOverlapCore() = default;

  // Records the work of `rank` on its streams.
  virtual void Record(int rank, RankStreams streams) const = 0;

  int num_signals() const;

 protected:
  // The signals of one rank. A chunk has arrived when its rows are among the gathered ones, or its
  // rank's addend of a sum is. A rank has computed a chunk when the chunk can be sent or read.
  Signal Arrived(int chunk) const;
  Signal Computed(int chunk, int by) const;

  // ---- The product and its chunks. Rows to multiply are among the gathered ones, or alone.
  void MultiplyAll(int rank) const;
  void MultiplyAllTo(int rank, char* partial) const;
  void MultiplyGathered(int rank, int chunk) const;
  void MultiplyAlone(int rank, int chunk) const;              // reads them in their rank's memory
  void MultiplyGatheredPair(int rank, int chunk) const;       // chunk and chunk + 1
  void MultiplyPartial(int rank, int chunk, char* to) const;  // -> [B, capacity, n]
  // -> output [B, capacity, n], reading the operands in place, in the memory of their ranks.
  void MultiplyOfAllRanks(int rank) const;
  // Computes columns [begin, end) of the product -> [B, total, end - begin].
  void MultiplyColumns(int rank, int64_t begin, int64_t end, char* to) const;

  // ---- Communication.
  char* GatheredRows(int rank) const;  // [B, total, k] or aux_out [B, total, width]
  // The copies that add a chunk and its scales to what `to` gathers: from the chunk's owner, or
  // from where `from` has gathered it. Empty for a rank elsewhere.
  std::vector<RowCopy> OwnToGathered(int rank, int to) const;
  std::vector<RowCopy> GatheredToGathered(int chunk, int from, int to) const;
  // Copies the rank's own rows to all ranks, including itself.
  void AllGather(int rank, Stream& stream) const;
  void WaitForAllChunks(int rank, Stream& stream) const;
  // All ranks know that this one has computed a chunk; this one waits for that of all ranks.
  void TellAll(int rank, int chunk, Stream& stream) const;
  void WaitForAll(int chunk, Stream& stream) const;
  // Copies a result that was gathered where other ranks reach it to its own array.
  bool KeepsGathered() const;
  void KeepGathered(int rank, Stream& stream) const;
  // Arrays [B, rows_of_batch, pitch] that are summed in this order.
  struct Sources {
    std::vector<const char*> first_rows;  // of batch 0
    int64_t rows_of_batch;
    int64_t pitch;  // elements
  };
  // The rows of `rank` in [B, total, pitch].
  Sources RowsOf(int rank, std::vector<const char*> whole, int64_t pitch) const;
  // Writes the sum of the sources + bias to columns [begin, end) of output [B, capacity, n].
  void Reduce(int rank, const Sources& sources, int64_t begin, int64_t end) const;
  std::vector<const char*> Buffers(int64_t offset = 0) const;  // `offset` bytes into each
  // The remaining work once the product is in the output.
  void Finish(int rank, Stream& stream) const;

  int num_column_chunks() const;  // chunks of the pipeline: at most one per column
  int most_chunks() const;        // of rows or columns
  int Rank(int64_t rank) const;   // modulo the number of ranks
  int64_t width() const;          // columns of the array that is gathered or summed
  DataType summed_type() const;

  const OverlapProblem p_;
  const std::shared_ptr<Arithmetic> arithmetic_;
  const std::vector<int64_t> offsets_;  // of chunks in rank order

 private:
  std::vector<int64_t> RingOffsets(int rank) const;
  char* GatheredScales(int rank) const;  // [p], or lines stored as the gathered rows are
  Matrix GatheredLhs(int rank, int chunk) const;
  std::vector<RowCopy> CopyChunk(int chunk, const char* rows, const char* scales, bool is_alone,
                                 int to) const;
  // Without bias.
  GemmTask PartialTask(int rank, char* partial) const;
  void MultiplyRows(int rank, int chunk, const Matrix& lhs, int64_t first_row,
                    int64_t rows_of_batch) const;
};

// Sequential: gathers, then multiplies; or multiplies, then reduces.
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

// Point to point: a rank puts chunks to one other rank at a time. Ring exchange.
class CommOverlapP2PBase final : public CommOverlapCore {
 public:
  using CommOverlapCore::CommOverlapCore;
  void Record(int rank, RankStreams streams) const override;

 private:
  void RecordAllGather(int rank, RankStreams streams) const;
  void RecordPairs(int rank, RankStreams streams) const;
  void RecordReduceScatter(int rank, RankStreams streams) const;
};

std::unique_ptr<CommOverlapCore> MakeCommOverlap(OverlapProblem problem,
                                                 std::shared_ptr<Arithmetic> arithmetic);

}  // namespace cpd
