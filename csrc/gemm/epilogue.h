// Epilogues, applied to the sums of a product before they are stored: bias, GELU, its derivative.
#pragma once

#include <cstdint>

#include "numerics/element.h"

namespace cpd {

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

}  // namespace cpd
