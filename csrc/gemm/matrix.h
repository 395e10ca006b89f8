// Operands of a product as they lie in memory, and blocks of them as floats.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/element.h"

namespace cpd {

// What elements of 8 bits are multiplied with. One float32, or a power of two per block of 32
// elements that are contracted: byte b stands for 2^(b - 127), 255 for NaN.
struct Scales {
  static constexpr int64_t kBlock = 32;

  const char* data = nullptr;  // null: elements stand for themselves
  bool is_blocks = false;
  int64_t pitch = 0;  // bytes from one line of scales to the next
  // Whether a block lies across lines of the matrix, at [line / 32, position], or along one, at
  // [line, position / 32].
  bool across_lines = false;
  int64_t line = 0, position = 0;  // where the matrix begins
};

// Elements [row, column] at data + (row * pitch + column) elements, or, if `transposed`, at
// data + (column * pitch + row).
struct Matrix {
  const char* data = nullptr;
  DataType type = DataType::kOther;
  int64_t pitch = 0;
  bool transposed = false;
  Scales scales = {};

  // Without the first rows or columns.
  Matrix FromRow(int64_t row) const;
  Matrix FromColumn(int64_t column) const;
};

// Elements in a wide type, in the lines in which the matrix lies.
template <typename Wide>
struct WideBlock {
  const Wide* data;
  int64_t pitch;
};

// A block of a matrix: where it lies, if it is wide already, or widened into `scratch`.
template <typename Wide>
WideBlock<Wide> TakeBlock(const Matrix& matrix, int64_t row, int64_t num_rows, int64_t column,
                          int64_t num_columns, std::vector<Wide>* scratch);

// out[column] += the sum of the matrix's rows, in their order.
template <typename Wide>
void AddRows(const Matrix& matrix, int64_t num_rows, int64_t num_columns, Wide* out);

}  // namespace cpd
