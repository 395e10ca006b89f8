// GEMMs that overlap with communication: what a schedule of them computes with, and its recording.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "transport/team.h"

namespace cpd {

// ---- The arithmetic of a schedule: on CPU it runs at once, on the calling threads; on GPUs it is
// enqueued on the stream of the current step.

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

class CommOverlap {
 public:
  virtual ~CommOverlap() = default;

  // The work of all ranks; it must not outlive this.
  virtual Schedule Record() const = 0;
  virtual int num_signals() const = 0;
};

std::unique_ptr<CommOverlap> MakeCommOverlap(OverlapProblem problem,
                                             std::shared_ptr<Arithmetic> arithmetic);

}  // namespace cpd
