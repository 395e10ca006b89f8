// Sums rows of several sources in a fixed order, in a wider type, rounding once.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/element.h"

namespace cpd {

// Accumulates bf16, f16 and f32 in f32, everything else in its own type. `out` is `in`, or the
// type of accumulation.
struct SumTypes {
  DataType in = DataType::kOther;
  DataType out = DataType::kOther;
};

bool SumIsSupported(SumTypes types);

// out[i] = sources[0][i] + sources[1][i] + ..., from the left; zero if there is no source.
void SumRows(SumTypes types, const std::vector<const char*>& sources, int64_t num_elements,
             char* out);

}  // namespace cpd
