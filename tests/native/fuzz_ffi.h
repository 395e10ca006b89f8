// The common part of the fuzzers of custom calls: numbers, and arrays in memory of exactly their
// size.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi_frame.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// At and next to every limit that is checked.
constexpr int64_t kHostile[] = {-1,
                                0,
                                1,
                                (int64_t{1} << 16) + 1,
                                (int64_t{1} << 31) - 1,
                                int64_t{1} << 31,
                                (int64_t{1} << 32) + 1,
                                int64_t{1} << 48,
                                (int64_t{1} << 48) + 1,
                                int64_t{1} << 62,
                                std::numeric_limits<int64_t>::max(),
                                std::numeric_limits<int64_t>::min()};

// Mostly valid values, as the fuzzer's bytes decide: others are rejected at once. Missing bytes are
// 0, which is valid.
class Chooser {
 public:
  Chooser(const uint8_t* bytes, size_t num_bytes) : data_(bytes, num_bytes) {}

  bool Flag() { return data_.ConsumeBool(); }
  int64_t Number(int64_t low, int64_t high) {
    return data_.ConsumeIntegralInRange<int64_t>(low, high);
  }
  bool Seldom() { return Number(0, 63) == 63; }
  int64_t Mostly(int64_t fitting, int64_t low, int64_t high) {
    return Seldom() ? Number(low, high) : fitting;
  }
  int64_t Hostile() { return kHostile[Number(0, std::size(kHostile) - 1)]; }
  int64_t MostlyOrHostile(int64_t fitting) {
    if (!Seldom()) return fitting;
    return Flag() ? Hostile() : Number(-1, 9);
  }
  // Any type that XLA knows, and one that it does not.
  XLA_FFI_DataType Type(XLA_FFI_DataType fitting) {
    return Seldom() ? static_cast<XLA_FFI_DataType>(Number(0, 34)) : fitting;
  }
  // These dimensions, or changed: another size, one more or one less.
  std::vector<int64_t> Dims(std::vector<int64_t> fitting) {
    for (int64_t& dim : fitting) dim = std::max<int64_t>(MostlyOrHostile(dim), 0);
    if (Seldom()) fitting.insert(fitting.begin(), std::max<int64_t>(MostlyOrHostile(1), 0));
    if (Seldom() && !fitting.empty()) fitting.pop_back();
    return fitting;
  }
  // An integer of metadata.
  int64_t Integer() {
    if (Seldom()) return data_.ConsumeIntegral<int64_t>();
    const int64_t small = Number(0, 7);
    return small < 7 ? small : -1;
  }
  std::string Text() { return data_.ConsumeRandomLengthString(8); }

 private:
  FuzzedDataProvider data_;
};

// Checks that the message begins with the name of the call.
inline bool IsRefused(const Status& status, const std::string& op) {
  if (status.ok()) return false;
  if (op.empty() || status.message.rfind(op, 0) != 0) __builtin_trap();
  return true;
}

// Type and dimensions of an array; the same on all ranks, as the program is.
struct Shape {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
};

// Bytes of an element in XLA's storage.
inline int64_t StoredBytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64: return 8;
    case XLA_FFI_DataType_C128: return 16;
    default: return 1;
  }
}

// Arrays of one rank, in memory of exactly their size: the sanitizer sees every access outside.
class Arrays {
 public:
  // Shapes that exceed the memory get a dimension of 0: XLA has no such arrays otherwise.
  static constexpr int64_t kMostBytes = 80 << 20;
  static int64_t Fit(Shape* shape) {
    int64_t bytes = StoredBytes(shape->type);
    bool is_empty = false, is_large = false;
    for (const int64_t dim : shape->dims) {
      is_empty = is_empty || dim == 0;
      is_large = is_large || __builtin_mul_overflow(bytes, dim, &bytes) || bytes > kMostBytes;
      if (is_large) bytes = 1;
    }
    if (is_large && !is_empty) shape->dims[shape->dims.size() / 2] = 0;
    return is_large || is_empty ? 0 : bytes;
  }

  // `behind`: the end of existing memory to use; allocating much takes long.
  XLA_FFI_Buffer* Make(Shape shape, char* behind = nullptr) {
    const int64_t num_bytes = Fit(&shape);
    Array& array = arrays_.emplace_back();
    array.dims = std::move(shape.dims);
    array.num_bytes = num_bytes;
    if (behind == nullptr) {
      array.bytes.reset(new char[num_bytes]);
      if (num_bytes <= 4096) std::memset(array.bytes.get(), 0, num_bytes);
    }
    array.buffer = {XLA_FFI_Buffer_STRUCT_SIZE,
                    nullptr,
                    shape.type,
                    behind ? behind - num_bytes : array.bytes.get(),
                    static_cast<int64_t>(array.dims.size()),
                    array.dims.data()};
    return &array.buffer;
  }

  // Small integers mostly, in the bytes of a small array.
  void FillWithIntegers(Chooser* chooser) {
    Array& array = arrays_.back();
    const int64_t width = std::min<int64_t>(StoredBytes(array.buffer.dtype), 8);
    for (int64_t at = 0; at + width <= std::min<int64_t>(array.num_bytes, 512); at += width) {
      const int64_t value = chooser->Integer();
      std::memcpy(array.bytes.get() + at, &value, width);
    }
  }

 private:
  struct Array {
    XLA_FFI_Buffer buffer;
    std::vector<int64_t> dims;
    int64_t num_bytes = 0;
    std::unique_ptr<char[]> bytes;
  };
  std::deque<Array> arrays_;
};

}  // namespace cpd
