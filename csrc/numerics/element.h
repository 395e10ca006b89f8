// Element types of arrays: sizes, and conversions of the narrow floats.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define CPD_HOST_DEVICE __host__ __device__
#else
#define CPD_HOST_DEVICE
#endif

namespace cpd {

enum class DataType : uint8_t {
  kE4M3,  // 8 bits, without infinities
  kE5M2,
  kBF16,
  kF16,
  kF32,
  kF64,
  kI8,
  kU8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kOther
};

inline int64_t ElementBytes(DataType type) {
  constexpr int8_t kBytes[] = {1, 1, 2, 2, 4, 8, 1, 1, 2, 2, 4, 4, 8, 8, 0};
  return kBytes[static_cast<int>(type)];
}

// Types that multiply but do not sum.
inline bool IsByteFloat(DataType type) {
  return type == DataType::kE4M3 || type == DataType::kE5M2;
}

CPD_HOST_DEVICE inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

CPD_HOST_DEVICE inline uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct BF16 {
  uint16_t bits;

  CPD_HOST_DEVICE operator float() const { return FromBits(uint32_t{bits} << 16); }

  CPD_HOST_DEVICE static BF16 Round(float value) {
    const uint32_t bits = ToBits(value);
    if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};     // a quiet NaN
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // ties to even
  }
};

struct F16 {
  uint16_t bits;

  CPD_HOST_DEVICE operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t rest = bits & 0x7fffu;
    if (rest >= 0x7c00) return FromBits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return FromBits(sign | ((rest << 13) + ((127 - 15) << 23)));
    const float subnormal = static_cast<float>(rest) * 0x1p-24f;  // exact
    return sign ? -subnormal : subnormal;
  }

  CPD_HOST_DEVICE static F16 Round(float value) {
    const uint32_t all = ToBits(value);
    const uint16_t sign = static_cast<uint16_t>((all >> 16) & 0x8000u);
    const uint32_t magnitude = all & 0x7fffffffu;
    uint16_t rest;
    if (magnitude > 0x7f800000u) {
      rest = 0x7e00;  // NaN
    } else if (magnitude >= 0x477ff000u) {
      rest = 0x7c00;                        // 65520 and above round to infinity
    } else if (magnitude >= 0x38800000u) {  // normal: re-bias, round to nearest even
      rest = static_cast<uint16_t>(
          (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
    } else {  // subnormal: adding 0.5 leaves the rounded significand in the lowest bits
      rest = static_cast<uint16_t>(ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f));
    }
    return {static_cast<uint16_t>(sign | rest)};
  }
};

struct E4M3 {
  uint8_t bits;

  CPD_HOST_DEVICE operator float() const {
    const uint32_t sign = uint32_t{bits & 0x80u} << 24;
    const uint32_t rest = bits & 0x7fu;
    if (rest == 0x7f) return FromBits(sign | 0x7fc00000);  // NaN
    if (rest >= 0x08) return FromBits(sign | ((rest << 20) + ((127 - 7) << 23)));
    const float subnormal = static_cast<float>(rest) * 0x1p-9f;  // exact
    return sign ? -subnormal : subnormal;
  }
};

struct E5M2 {
  uint8_t bits;

  CPD_HOST_DEVICE operator float() const { return F16{static_cast<uint16_t>(bits << 8)}; }
};

template <typename T>
CPD_HOST_DEVICE T Round(std::conditional_t<std::is_arithmetic_v<T>, T, float> value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else {
    return T::Round(value);
  }
}

// ---- Integers of metadata: 32 or 64 bits, signed or unsigned.

enum class IntType : uint8_t { kI32, kU32, kI64, kU64 };

// Values above 63 bits read as negative.
struct IntArray {
  const void* data = nullptr;
  IntType type = IntType::kI32;

  CPD_HOST_DEVICE explicit operator bool() const { return data != nullptr; }

  CPD_HOST_DEVICE int64_t operator[](int64_t i) const {
    switch (type) {
      case IntType::kI32: return static_cast<const int32_t*>(data)[i];
      case IntType::kU32: return static_cast<const uint32_t*>(data)[i];
      case IntType::kI64:
      case IntType::kU64: return static_cast<const int64_t*>(data)[i];
    }
    return -1;
  }

  // The array without its first i elements.
  CPD_HOST_DEVICE IntArray From(int64_t i) const {
    const int64_t bytes = type == IntType::kI32 || type == IntType::kU32 ? 4 : 8;
    return {static_cast<const char*>(data) + i * bytes, type};
  }
};

}  // namespace cpd
