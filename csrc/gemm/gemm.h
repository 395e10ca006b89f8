// Matrix products on CPU: float32 accumulation; narrow types are widened block by block.
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

// c [m, n] = a [m, k] b [k, n] (+ further products, in order), then the epilogue, rounded once.
struct GemmTask {
  int64_t m = 0, n = 0, k = 0;
  Matrix a, b;
  std::vector<Factors> more = {};  // of the same types
  char* c = nullptr;
  DataType c_type = DataType::kOther;
  int64_t c_pitch = 0;  // elements
  Epilogue epilogue = {};

  // The task of a sub-block of the result: drops the first rows or columns.
  GemmTask FromRow(int64_t row) const;
  GemmTask FromColumn(int64_t column) const;
};

using GemmFunction = std::function<void(const GemmTask&)>;

bool GemmIsSupported(DataType a, DataType b, DataType c);

// Deterministic: the same task gives the same bits. Uses `num_threads` threads.
void RunGemm(const GemmTask& task, int num_threads);

// The accumulation type of products of these operands.
DataType AccumulationType(DataType type);

}  // namespace cpd
