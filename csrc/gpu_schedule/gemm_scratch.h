// Scratch memory of a rank's product on a GPU.
#pragma once

#include <cstdint>

#include "gemm/overlap_problem.h"

namespace cpd {

// In this order: cuBLASLt's workspace, transposed 8-bit operands, and sums for an epilogue in a
// kernel.
struct GemmScratch {
  static constexpr int64_t kLtBytes = 32 << 20;

  char* lt = nullptr;  // aligned to 256 bytes
  char* rhs = nullptr;
  char* lhs = nullptr;
  char* sums = nullptr;

  // Lays out the scratch of a whole product, at any address; `data` may be nullptr. Returns its
  // size in bytes. Python asks XLA for the same number.
  static int64_t Lay(const OverlapProblem& problem, char* data, GemmScratch* scratch);
};

}  // namespace cpd
