// Matrix products on CPU: float32 accumulation, narrow types widened block by block.
#pragma once

#include <cstdint>
#include <functional>

#include "numerics/element.h"

namespace cpd {

// Elements [row, column] at data + (row * pitch + column) elements, or, if `transposed`, at
// data + (column * pitch + row).
struct Matrix {
  const char* data = nullptr;
  DataType type = DataType::kOther;
  int64_t pitch = 0;
  bool transposed = false;

  // Without the first rows or columns.
  Matrix FromRow(int64_t row) const;
  Matrix FromColumn(int64_t column) const;
};

// c [m, n] = a [m, k] b [k, n] (+ bias [n] on every row), rounded once.
struct GemmTask {
  int64_t m = 0, n = 0, k = 0;
  Matrix a, b;
  char* c = nullptr;
  DataType c_type = DataType::kOther;
  int64_t c_pitch = 0;         // elements
  const char* bias = nullptr;  // of c's type
};

using GemmFunction = std::function<void(const GemmTask&)>;

bool GemmIsSupported(DataType a, DataType b, DataType c);

// Repeatable: the same task gives the same bits. Uses `num_threads` threads.
void RunGemm(const GemmTask& task, int num_threads);

// out[i] = source[i] (+ bias[i]), rounded from float32 (float64 for kF64).
void AddBiasAndRound(const char* source, const char* bias, int64_t num_elements, DataType type,
                     char* out);

// The type in which products of these operands are summed.
DataType AccumulationType(DataType type);

}  // namespace cpd
