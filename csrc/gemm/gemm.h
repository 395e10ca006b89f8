// GEMMs on the CPU: of matrices of one type, or of groups of rows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "numerics/element.h"
#include "transport/transport.h"

namespace cpd {

// ---- Operands of a product in memory, and blocks of them as floats.

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

// ---- Epilogues, applied to the sums of a product before they are stored: bias, GELU, its
// derivative.

// For each element, z = sum + bias. The stored value is z, GELU(z), or z GELU'(gelu_input), with
// the tanh approximation of GELU. Arrays have the output's type; those of the output's shape have
// its layout too.
struct Epilogue {
  const char* bias = nullptr;  // [n]
  bool gelu = false;
  char* pre_gelu = nullptr;          // with gelu: z is also stored here
  const char* gelu_input = nullptr;  // with gelu: apply its derivative instead

  bool is_empty() const { return bias == nullptr && !gelu; }

  // The epilogue of the output from this element on, with the arrays of its columns from this
  // column on.
  Epilogue From(int64_t element, int64_t column, DataType type) const;
};

// Applies it to one row of n sums, in float32 (float64 for kF64), rounded once.
void StoreRow(DataType type, const float* sums, const Epilogue& epilogue, int64_t n, char* to);
void StoreRow(DataType type, const double* sums, const Epilogue& epilogue, int64_t n, char* to);

// ---- Matrix products on CPU: float32 accumulation; narrow types are widened block by block.

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

// ---- Grouped GEMM: one product per group of rows; group sizes are known only at run time.

// Rows are sorted by group. By default output [m, n] is each group's rows times its own matrix, rhs
// [g, k, n] or, transposed, [g, n, k], + bias [g, n]; rows after the last group become zero. With
// `contracts_rows`, lhs [m, k] and rhs [m, n] give output [g, k, n].
struct GroupedProduct {
  int64_t num_groups = 0, m = 0, n = 0, k = 0;
  bool contracts_rows = false;
  bool rhs_transposed = false;
  DataType lhs_type = DataType::kOther, rhs_type = DataType::kOther, output_type = DataType::kOther;
  const char* lhs = nullptr;
  const char* rhs = nullptr;
  const float* lhs_scales = nullptr;  // [g], or nullptr
  const float* rhs_scales = nullptr;
  const char* bias = nullptr;
  const int32_t* group_sizes = nullptr;  // [g]
  char* output = nullptr;
};

// Rejects negative group sizes, and sums above the number of rows, before it writes. Deterministic.
Status RunGroupedGemm(const std::string& op, const GroupedProduct& product, int num_threads);

}  // namespace cpd
