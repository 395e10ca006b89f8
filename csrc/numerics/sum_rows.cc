// Sums rows of several sources in a fixed order and a wider type; rounds once.
#include "numerics/sum_rows.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

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

template <bool kFused, typename Acc>
inline Acc MultiplyAdd(Acc x, Acc y, Acc z) {
  if constexpr (!kFused) return x * y + z;
  if constexpr (std::is_same_v<Acc, float>) return __builtin_fmaf(x, y, z);
  return __builtin_fma(x, y, z);
}

#ifdef __x86_64__
// Element by element, these would take most of the time.
[[gnu::target("avx2,f16c")]] void Widen(const F16* row, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) to[i] = row[i];
}

[[gnu::target("avx2,f16c")]] void Narrow(const float* values, int64_t n, F16* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < n; ++i) to[i] = Round<F16>(values[i]);
}

constexpr bool kHasF16c = true;
#else
constexpr bool kHasF16c = false;
#endif

template <bool kFused, typename T>
[[gnu::always_inline]] inline void SumWeighted(const std::vector<const char*>& sources,
                                               const std::vector<RowWeight>& weights,
                                               int64_t num_elements, char* out_bytes) {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr bool kByF16c = kHasF16c && kFused && std::is_same_v<T, F16>;
  T* out = reinterpret_cast<T*>(out_bytes);
  Acc part[kTile], total[kTile], wide[kTile];
  for (int64_t begin = 0; begin < num_elements; begin += kTile, out += kTile) {
    const int64_t n = std::min(kTile, num_elements - begin);
    const auto read = [&](const T* row) {
      if constexpr (kByF16c) {
        Widen(row, n, wide);
        return static_cast<const Acc*>(wide);
      } else {
        return row;
      }
    };
    const auto write = [&](const Acc* values) {
      if constexpr (kByF16c) {
        Narrow(values, n, out);
      } else {
        for (int64_t i = 0; i < n; ++i) out[i] = Round<T>(values[i]);
      }
    };
    for (size_t s = 0, first = 0; s < sources.size(); ++s) {
      const auto* row = read(reinterpret_cast<const T*>(sources[s]) + begin);
      const auto weight = static_cast<Acc>(weights[s].weight);
      if (s == first) std::fill_n(part, n, Acc{0});
      for (int64_t i = 0; i < n; ++i) {
        part[i] = MultiplyAdd<kFused>(static_cast<Acc>(row[i]), weight, part[i]);
      }
      if (!weights[s].ends_part) continue;
      write(part);
      const auto* rounded = read(out);
      const bool is_only = first == 0;
      for (int64_t i = 0; i < n; ++i) {
        const Acc value = static_cast<Acc>(rounded[i]);
        total[i] = is_only ? value : total[i] + value;
      }
      first = s + 1;
    }
    write(total);
  }
}

template <bool kFused>
[[gnu::always_inline]] inline void SumWeightedOf(DataType type,
                                                 const std::vector<const char*>& sources,
                                                 const std::vector<RowWeight>& weights,
                                                 int64_t num_elements, char* out) {
  switch (type) {
    case DataType::kBF16:
      return SumWeighted<kFused, BF16>(sources, weights, num_elements, out);
    case DataType::kF16:
      return SumWeighted<kFused, F16>(sources, weights, num_elements, out);
    case DataType::kF32:
      return SumWeighted<kFused, float>(sources, weights, num_elements, out);
    case DataType::kF64:
      return SumWeighted<kFused, double>(sources, weights, num_elements, out);
    default:
      return;  // rejected when the exchange was planned
  }
}

#ifdef __x86_64__
[[gnu::target("avx2,fma,f16c")]] void SumWeightedByAvx2(DataType type,
                                                        const std::vector<const char*>& sources,
                                                        const std::vector<RowWeight>& weights,
                                                        int64_t num_elements, char* out) {
  SumWeightedOf<true>(type, sources, weights, num_elements, out);
}
#endif

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

void SumWeightedRows(DataType type, const std::vector<const char*>& sources,
                     const std::vector<RowWeight>& weights, int64_t num_elements, char* out) {
#ifdef __x86_64__
  // Every processor with avx2 converts f16, which GCC 10 cannot ask.
  static const bool is_fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (is_fused) return SumWeightedByAvx2(type, sources, weights, num_elements, out);
  SumWeightedOf<false>(type, sources, weights, num_elements, out);
#else
  SumWeightedOf<true>(type, sources, weights, num_elements, out);
#endif
}

}  // namespace cpd
