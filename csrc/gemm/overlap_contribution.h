// One rank's contribution to an overlapped GEMM, and the parts of it that other processes read.
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
  // `problem` has no memory yet; its configuration is that of the registered buffer, if there is
  // one.
  OverlapContribution(const OverlapProblem& problem, RankMemory memory);

  // The operands that peers read, in the order of the schedules, then the buffer.
  std::vector<SharedArray> SharedArrays() override;

  // Between processes. For a local rank: adds the copies that stage its operands, and returns its
  // memory with the shared buffer. For a rank elsewhere: returns what this process can read of it.
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
  std::vector<char*> shared_;  // by operand
  char* shared_buffer_ = nullptr;
};

}  // namespace cpd
