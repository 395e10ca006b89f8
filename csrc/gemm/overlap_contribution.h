// What one rank of an overlapped product brings, and what of it ranks of other processes read.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "gemm/overlap_problem.h"
#include "transport/transport.h"

namespace cpd {

// Pointers stay valid until the exchange is over.
class OverlapContribution final : public Contribution {
 public:
  // `problem` is without memory; its configuration is that of the buffer, if there is one.
  OverlapContribution(const OverlapProblem& problem, RankMemory memory);

  // Operands that peers read, as the schedules do, then the buffer.
  std::vector<SharedArray> SharedArrays() override;

  // Between processes: of a rank here, the copies of its operands to where others read them, and
  // its memory with the buffer there; of a rank elsewhere, what this process finds of it.
  RankMemory Share(WorkList* work) const;

  const RankMemory& memory() const { return memory_; }

 private:
  struct Operand {
    const char* RankMemory::* place;
    int64_t num_bytes;
  };
  static std::vector<Operand> OperandsForPeers(const OverlapProblem& problem);

  RankMemory memory_;
  const std::vector<Operand> operands_;
  const int64_t buffer_bytes_;
  std::vector<char*> shared_;  // of each operand
  char* shared_buffer_ = nullptr;
};

}  // namespace cpd
