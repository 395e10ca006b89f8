// What a rank's product on a GPU computes with besides its operands and results.
#pragma once

#include <cstdint>

#include "gemm/overlap_problem.h"

namespace cpd {

// In this order: cuBLASLt's workspace, 8-bit operands laid otherwise, and sums whose epilogue a
// kernel makes.
struct GemmScratch {
  static constexpr int64_t kLtBytes = 32 << 20;

  char* lt = nullptr;  // aligned to 256 bytes
  char* rhs = nullptr;
  char* lhs = nullptr;
  char* sums = nullptr;

  // Of the whole product, from anywhere in memory; `data` may be null. Returns the bytes it takes.
  // Python asks XLA for as many.
  static int64_t Lay(const OverlapProblem& problem, char* data, GemmScratch* scratch);
};

}  // namespace cpd
