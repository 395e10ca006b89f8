// Operands of a product in memory, and blocks of them as floats.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/element.h"

namespace cpd {

// Scales of 8-bit elements. Either one float32, or a power of two per block of 32 contracted
// elements: byte b is 2^(b - 127), 255 is NaN.
struct Scales {
  static constexpr int64_t kBlock = 32;

  const char* data = nullptr;  // nullptr: no scale
  bool is_blocks = false;
  int64_t pitch = 0;  // bytes from one line of scales to the next
  // True: a block spans 32 lines of the matrix, with its scale at [line / 32, position]. False: it
  // spans 32 positions of a line, with its scale at [line, position / 32].
  bool across_lines = false;
  int64_t line = 0, position = 0;  // start of the matrix
};

// Element [row, column] is at data + (row * pitch + column) elements or, if `transposed`, at data +
// (column * pitch + row).
struct Matrix {
  const char* data = nullptr;
  DataType type = DataType::kOther;
  int64_t pitch = 0;
  bool transposed = false;
  Scales scales = {};

  // The matrix without its first rows or columns.
  Matrix FromRow(int64_t row) const;
  Matrix FromColumn(int64_t column) const;
};

// The elements in a wide type, in the order of the lines in memory.
template <typename Wide>
struct WideBlock {
  const Wide* data;
  int64_t pitch;
};

// A block of a matrix: in place if it is wide already, else widened into `scratch`.
template <typename Wide>
WideBlock<Wide> TakeBlock(const Matrix& matrix, int64_t row, int64_t num_rows, int64_t column,
                          int64_t num_columns, std::vector<Wide>* scratch);

// out[column] += the sum of the matrix's rows in order.
template <typename Wide>
void AddRows(const Matrix& matrix, int64_t num_rows, int64_t num_columns, Wide* out);

}  // namespace cpd
