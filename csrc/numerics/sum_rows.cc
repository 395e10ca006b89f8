// Sums rows of several sources in a fixed order and a wider type; rounds once.
#include "numerics/sum_rows.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace cpd {
namespace {

// Elements summed at a time: the accumulators stay in the first-level cache.
constexpr int64_t kTile = 1024;

template <typename In, typename Acc, typename Out>
void Sum(const std::vector<const char*>& sources, int64_t num_elements, char* out_bytes) {
  // Signed overflow wraps, as everywhere in XLA.
  using Wrap = typename std::conditional_t<std::is_integral_v<Acc>, std::make_unsigned<Acc>,
                                           std::common_type<Acc>>::type;
  Out* out = reinterpret_cast<Out*>(out_bytes);
  Wrap sum[kTile];
  for (int64_t begin = 0; begin < num_elements; begin += kTile) {
    const int64_t n = std::min(kTile, num_elements - begin);
    const In* first = reinterpret_cast<const In*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<Wrap>(static_cast<Acc>(first[i]));
    const auto at = [&](size_t s) { return reinterpret_cast<const In*>(sources[s]) + begin; };
    const auto wide = [](In x) { return static_cast<Wrap>(static_cast<Acc>(x)); };
    size_t s = 1;
    for (; s + 4 <= sources.size(); s += 4) {  // fewer passes over the sums
      const In *a = at(s), *b = at(s + 1), *c = at(s + 2), *d = at(s + 3);
      for (int64_t i = 0; i < n; ++i) {
        sum[i] = (((sum[i] + wide(a[i])) + wide(b[i])) + wide(c[i])) + wide(d[i]);
      }
    }
    for (; s < sources.size(); ++s) {
      const In* next = at(s);
      for (int64_t i = 0; i < n; ++i) sum[i] += wide(next[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = Round<Out>(static_cast<Acc>(sum[i]));
  }
}

}  // namespace

bool SumIsSupported(SumTypes types) {
  if (ElementBytes(types.in) == 0 || IsByteFloat(types.in)) return false;
  if (types.in == types.out) return true;
  return (types.in == DataType::kBF16 || types.in == DataType::kF16) && types.out == DataType::kF32;
}

void SumRows(SumTypes types, const std::vector<const char*>& sources, int64_t num_elements,
             char* out) {
  if (sources.empty()) {
    std::memset(out, 0, num_elements * ElementBytes(types.out));
    return;
  }
  if (sources.size() == 1 && types.in == types.out) {  // nothing to round: bit for bit
    std::memcpy(out, sources[0], num_elements * ElementBytes(types.out));
    return;
  }
  const bool widen = types.in != types.out;
  switch (types.in) {
    case DataType::kBF16:
      return widen ? Sum<BF16, float, float>(sources, num_elements, out)
                   : Sum<BF16, float, BF16>(sources, num_elements, out);
    case DataType::kF16:
      return widen ? Sum<F16, float, float>(sources, num_elements, out)
                   : Sum<F16, float, F16>(sources, num_elements, out);
    case DataType::kF32:
      return Sum<float, float, float>(sources, num_elements, out);
    case DataType::kF64:
      return Sum<double, double, double>(sources, num_elements, out);
    case DataType::kI8:
      return Sum<int8_t, int8_t, int8_t>(sources, num_elements, out);
    case DataType::kU8:
      return Sum<uint8_t, uint8_t, uint8_t>(sources, num_elements, out);
    case DataType::kI16:
      return Sum<int16_t, int16_t, int16_t>(sources, num_elements, out);
    case DataType::kU16:
      return Sum<uint16_t, uint16_t, uint16_t>(sources, num_elements, out);
    case DataType::kI32:
      return Sum<int32_t, int32_t, int32_t>(sources, num_elements, out);
    case DataType::kU32:
      return Sum<uint32_t, uint32_t, uint32_t>(sources, num_elements, out);
    case DataType::kI64:
      return Sum<int64_t, int64_t, int64_t>(sources, num_elements, out);
    case DataType::kU64:
      return Sum<uint64_t, uint64_t, uint64_t>(sources, num_elements, out);
    case DataType::kE4M3:
    case DataType::kE5M2:
    case DataType::kOther:
      return;  // rejected when the exchange was planned
  }
}

}  // namespace cpd
