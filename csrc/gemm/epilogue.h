// What becomes of the sums of a product before they are stored: bias, GELU, its derivative.
#pragma once

#include <cstdint>

#include "numerics/element.h"

namespace cpd {

// Of one element: z = sum + bias; stored is z, GELU(z), or z GELU'(gelu_input). GELU is the
// approximation with tanh. Arrays are of the output's type; those over the output lie as it does.
struct Epilogue {
  const char* bias = nullptr;  // [n]
  bool gelu = false;
  char* pre_gelu = nullptr;          // with gelu: where z is stored, too
  const char* gelu_input = nullptr;  // with gelu: its derivative instead

  bool is_empty() const { return bias == nullptr && !gelu; }

  // That of the output without its first elements, and of what has its columns without the first.
  Epilogue From(int64_t element, int64_t column, DataType type) const;
};

// The part of one row: n sums, in float32 (float64 for kF64), rounded once.
void StoreRow(DataType type, const float* sums, const Epilogue& epilogue, int64_t n, char* to);
void StoreRow(DataType type, const double* sums, const Epilogue& epilogue, int64_t n, char* to);

}  // namespace cpd
