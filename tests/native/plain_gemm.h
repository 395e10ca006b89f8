// Poisoned arrays with a guard behind them, and a GEMM that is a plain loop over them.
#pragma once

#include <algorithm>
#include <memory>

#include "gemm/gemm.h"
#include "ranks.h"

namespace cpd {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kGuardBytes = 0;  // the sanitizer sees accesses past the end, also reads
#else
inline constexpr int64_t kGuardBytes = 64;
#endif
inline constexpr char kGuard = 0x5a;
inline constexpr char kPoison = '\xff';  // NaN in every type

inline float Load(DataType type, const char* data, int64_t index) {
  if (type == DataType::kBF16) return reinterpret_cast<const BF16*>(data)[index];
  CHECK(type == DataType::kF32);
  return reinterpret_cast<const float*>(data)[index];
}

inline float RoundTo(DataType type, float value) {
  return type == DataType::kBF16 ? static_cast<float>(BF16::Round(value)) : value;
}

inline void Store(DataType type, char* data, int64_t index, float value) {
  if (type == DataType::kBF16) {
    reinterpret_cast<BF16*>(data)[index] = BF16::Round(value);
  } else {
    reinterpret_cast<float*>(data)[index] = value;
  }
}

inline float At(const Matrix& matrix, int64_t row, int64_t column) {
  const int64_t index =
      matrix.transposed ? column * matrix.pitch + row : row * matrix.pitch + column;
  return Load(matrix.type, matrix.data, index);
}

inline float Dot(const Matrix& a, int64_t row, const Matrix& b, int64_t column, int64_t k) {
  float sum = 0;
  for (int64_t l = 0; l < k; ++l) sum += At(a, row, l) * At(b, l, column);
  return sum;
}

inline void PlainGemm(const GemmTask& task) {
  for (int64_t i = 0; i < task.m; ++i) {
    for (int64_t j = 0; j < task.n; ++j) {
      float sum = Dot(task.a, i, task.b, j, task.k);
      for (const Factors& f : task.more) sum += Dot(f.a, i, f.b, j, f.k);
      const char* bias = task.epilogue.bias;
      if (bias) sum += Load(task.c_type, bias, j);
      Store(task.c_type, task.c, i * task.c_pitch + j, sum);
    }
  }
}

// Poisoned rows with a guard behind them. Without rows and columns: an absent array.
class Array {
 public:
  Array() = default;
  Array(DataType type, int64_t num_rows, int64_t num_columns, bool transposed = false)
      : type_(type),
        pitch_(transposed ? num_rows : num_columns),
        transposed_(transposed),
        num_bytes_(num_rows * num_columns * ElementBytes(type)),
        bytes_(new char[num_bytes_ + kGuardBytes]) {
    std::fill_n(bytes_.get(), num_bytes_, kPoison);
    std::fill_n(bytes_.get() + num_bytes_, kGuardBytes, kGuard);
  }

  char* data() const { return bytes_.get(); }
  Matrix matrix() const { return {data(), type_, pitch_, transposed_}; }
  float operator()(int64_t row, int64_t column) const { return At(matrix(), row, column); }
  void Set(int64_t row, int64_t column, float value) {
    Store(type_, data(), transposed_ ? column * pitch_ + row : row * pitch_ + column, value);
  }
  bool Holds(const char* address) const {
    return bytes_ && address >= data() && address < data() + num_bytes_;
  }
  bool IsIntact() const {
    return !bytes_ || std::all_of(data() + num_bytes_, data() + num_bytes_ + kGuardBytes,
                                  [](char byte) { return byte == kGuard; });
  }

 private:
  DataType type_ = DataType::kOther;
  int64_t pitch_ = 0;
  bool transposed_ = false;
  int64_t num_bytes_ = 0;
  std::unique_ptr<char[]> bytes_;
};

}  // namespace cpd
