// Matrix products on CPU: float32 accumulation, narrow types widened block by block.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "gemm/epilogue.h"
#include "gemm/matrix.h"
#include "numerics/element.h"

namespace cpd {

// a [m, k] and b [k, n].
struct Factors {
  int64_t k;
  Matrix a, b;
};

// c [m, n] = a [m, k] b [k, n] (+ more of them, in their order), and what its epilogue makes of it,
// rounded once.
struct GemmTask {
  int64_t m = 0, n = 0, k = 0;
  Matrix a, b;
  std::vector<Factors> more = {};  // of the same types
  char* c = nullptr;
  DataType c_type = DataType::kOther;
  int64_t c_pitch = 0;  // elements
  Epilogue epilogue = {};

  // The task without the first rows or columns of its result; as many are left as before.
  GemmTask FromRow(int64_t row) const;
  GemmTask FromColumn(int64_t column) const;
};

using GemmFunction = std::function<void(const GemmTask&)>;

bool GemmIsSupported(DataType a, DataType b, DataType c);

// Repeatable: the same task gives the same bits. Uses `num_threads` threads.
void RunGemm(const GemmTask& task, int num_threads);

// The type in which products of these operands are summed.
DataType AccumulationType(DataType type);

}  // namespace cpd
