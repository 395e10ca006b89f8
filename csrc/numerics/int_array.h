// Integers of metadata: 32 or 64 bits, signed or unsigned.
#pragma once

#include <cstdint>

#include "numerics/host_device.h"

namespace cpd {

enum class IntType : uint8_t { kI32, kU32, kI64, kU64 };

// Values above 63 bits read as negative.
struct IntArray {
  const void* data = nullptr;
  IntType type = IntType::kI32;

  CPD_HOST_DEVICE explicit operator bool() const { return data != nullptr; }

  CPD_HOST_DEVICE int64_t operator[](int64_t i) const {
    switch (type) {
      case IntType::kI32:
        return static_cast<const int32_t*>(data)[i];
      case IntType::kU32:
        return static_cast<const uint32_t*>(data)[i];
      case IntType::kI64:
      case IntType::kU64:
        return static_cast<const int64_t*>(data)[i];
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
