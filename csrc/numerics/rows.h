// Rows of an exchange on the CPU: their sums in a fixed order, and copies past the caches.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/element.h"

namespace cpd {

// ---- Sums rows of several sources in a fixed order and a wider type; rounds once.

// bf16, f16 and f32 accumulate in f32, all other types in their own. `out` is `in`, or the
// accumulation type.
struct SumTypes {
  DataType in = DataType::kOther;
  DataType out = DataType::kOther;
};

bool SumIsSupported(SumTypes types);
bool WeightedSumIsSupported(SumTypes types);

// out[i] = sources[0][i] + sources[1][i] + ..., from left to right; zero without sources.
void SumRows(SumTypes types, const std::vector<const char*>& sources, int64_t num_elements,
             char* out);

// The weight of a source, and whether it is the last of its part.
struct RowWeight {
  double weight;
  bool ends_part;
};

// The same of parts of the sources, at least one. A part is the sum of its sources times
// their weights, from zero and by fused multiply-adds where the processor has them, as XLA computes
// it; it is rounded to `type`, then the parts are summed.
void SumWeightedRows(DataType type, const std::vector<const char*>& sources,
                     const std::vector<RowWeight>& weights, int64_t num_elements, char* out);

// ---- Copies of an exchange that moves more bytes than caches hold.

// More bytes in one exchange than the caches of most processors hold.
constexpr int64_t kManyBytes = 32 << 20;

// As memcpy, with stores that do not first read into the cache what they overwrite; memcpy avoids
// that only in a single large copy. Complete, for other threads too, on return. Fetches as many
// bytes from `next`, the source of the following copy, into the cache; they need not exist.
void StreamCopy(char* to, const char* from, int64_t num_bytes, const char* next);

}  // namespace cpd
