// Sums rows of several sources in a fixed order and a wider type; rounds once.
#include "numerics/rows.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#ifdef __SSE2__
#include <emmintrin.h>
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

template <bool kFused, typename T>
[[gnu::always_inline]] inline void SumWeighted(const std::vector<const char*>& sources,
                                               const std::vector<RowWeight>& weights,
                                               int64_t num_elements, char* out_bytes) {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  T* out = reinterpret_cast<T*>(out_bytes);
  Acc part[kTile], total[kTile];
  for (int64_t begin = 0; begin < num_elements; begin += kTile) {
    const int64_t n = std::min(kTile, num_elements - begin);
    for (size_t s = 0, first = 0; s < sources.size(); ++s) {
      const T* row = reinterpret_cast<const T*>(sources[s]) + begin;
      const auto weight = static_cast<Acc>(weights[s].weight);
      const auto add = [&](const auto& before) __attribute__((always_inline)) {
        const auto sum = [&](int64_t i) __attribute__((always_inline)) {
          return MultiplyAdd<kFused>(static_cast<Acc>(row[i]), weight, before(i));
        };
        if (!weights[s].ends_part) {
          for (int64_t i = 0; i < n; ++i) part[i] = sum(i);
        } else if (first == 0) {
          for (int64_t i = 0; i < n; ++i) total[i] = static_cast<Acc>(Round<T>(sum(i)));
        } else {
          for (int64_t i = 0; i < n; ++i) total[i] += static_cast<Acc>(Round<T>(sum(i)));
        }
      };
      if (s == first) {
        add([](int64_t) { return Acc{0}; });
      } else {
        add([&](int64_t i) { return part[i]; });
      }
      if (weights[s].ends_part) first = s + 1;
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = Round<T>(total[i]);
  }
}

template <bool kFused>
[[gnu::always_inline]] inline void SumWeightedOf(DataType type,
                                                 const std::vector<const char*>& sources,
                                                 const std::vector<RowWeight>& weights,
                                                 int64_t num_elements, char* out) {
  switch (type) {
    case DataType::kBF16: return SumWeighted<kFused, BF16>(sources, weights, num_elements, out);
    case DataType::kF32: return SumWeighted<kFused, float>(sources, weights, num_elements, out);
    case DataType::kF64: return SumWeighted<kFused, double>(sources, weights, num_elements, out);
    default: return;  // rejected when the exchange was planned
  }
}

#ifdef __x86_64__
[[gnu::target("avx2,fma")]] void SumWeightedByAvx2(DataType type,
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

bool WeightedSumIsSupported(SumTypes types) {
  const bool is_known =
      types.in == DataType::kBF16 || types.in == DataType::kF32 || types.in == DataType::kF64;
  return is_known && types.out == types.in;
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
    case DataType::kF32: return Sum<float, float, float>(sources, num_elements, out);
    case DataType::kF64: return Sum<double, double, double>(sources, num_elements, out);
    case DataType::kI8: return Sum<int8_t, int8_t, int8_t>(sources, num_elements, out);
    case DataType::kU8: return Sum<uint8_t, uint8_t, uint8_t>(sources, num_elements, out);
    case DataType::kI16: return Sum<int16_t, int16_t, int16_t>(sources, num_elements, out);
    case DataType::kU16: return Sum<uint16_t, uint16_t, uint16_t>(sources, num_elements, out);
    case DataType::kI32: return Sum<int32_t, int32_t, int32_t>(sources, num_elements, out);
    case DataType::kU32: return Sum<uint32_t, uint32_t, uint32_t>(sources, num_elements, out);
    case DataType::kI64: return Sum<int64_t, int64_t, int64_t>(sources, num_elements, out);
    case DataType::kU64: return Sum<uint64_t, uint64_t, uint64_t>(sources, num_elements, out);
    case DataType::kE4M3:
    case DataType::kE5M2:
    case DataType::kOther: return;  // rejected when the exchange was planned
  }
}

void SumWeightedRows(DataType type, const std::vector<const char*>& sources,
                     const std::vector<RowWeight>& weights, int64_t num_elements, char* out) {
#ifdef __x86_64__
  static const bool is_fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (is_fused) return SumWeightedByAvx2(type, sources, weights, num_elements, out);
  SumWeightedOf<false>(type, sources, weights, num_elements, out);
#else
  SumWeightedOf<true>(type, sources, weights, num_elements, out);
#endif
}

// ---- By non-temporal stores of x86; elsewhere by memcpy.
void StreamCopy(char* to, const char* from, int64_t num_bytes, const char* next) {
#ifdef __SSE2__
  constexpr int64_t kLine = 64;  // stored as a whole: half a line costs as much
  const int64_t to_line = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  int64_t at = std::min(to_line, num_bytes);
  std::memcpy(to, from, at);
  for (; at + kLine <= num_bytes; at += kLine) {
    _mm_prefetch(next + at, _MM_HINT_T0);
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, from + at, kLine);
    auto* out = reinterpret_cast<__m128i*>(to + at);
    for (const __m128i& lanes : line) _mm_stream_si128(out++, lanes);
  }
  std::memcpy(to + at, from + at, num_bytes - at);
  _mm_sfence();
#else
  (void)next;
  std::memcpy(to, from, num_bytes);
#endif
}

}  // namespace cpd
