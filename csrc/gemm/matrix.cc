// Operands of a product in memory, and blocks of them as floats.
#include "gemm/matrix.h"

#include <algorithm>
#include <array>

namespace cpd {
namespace {

template <typename In, typename Wide>
void Widen(const Matrix& block, int64_t num_lines, int64_t length, Wide* to) {
  for (int64_t i = 0; i < num_lines; ++i) {
    const In* line = reinterpret_cast<const In*>(block.data) + i * block.pitch;
    for (int64_t j = 0; j < length; ++j) to[i * length + j] = static_cast<Wide>(line[j]);
  }
}

template <typename In>
const float* ValuesOfBytes() {
  static const auto values = [] {
    std::array<float, 256> of_byte;
    for (int byte = 0; byte < 256; ++byte) of_byte[byte] = In{static_cast<uint8_t>(byte)};
    return of_byte;
  }();
  return values.data();
}

// The scale of byte b as two factors: 2^-127 is subnormal and may be flushed to zero.
struct BlockScale {
  explicit BlockScale(char data)
      : first(data == 0 ? 0.5f : 1.0f), second(FromBits(Bits(static_cast<uint8_t>(data)))) {}

  float operator*(float value) const { return value * first * second; }

  static uint32_t Bits(uint8_t byte) {
    if (byte == 255) return 0x7fc00000;
    return uint32_t{byte == 0 ? uint8_t{1} : byte} << 23;
  }

  float first, second;
};

template <typename In>
void WidenScaled(const Matrix& block, int64_t num_lines, int64_t length, float* to) {
  const float* values = ValuesOfBytes<In>();
  const Scales& scales = block.scales;
  for (int64_t i = 0; i < num_lines; ++i) {
    const auto* line = reinterpret_cast<const uint8_t*>(block.data) + i * block.pitch;
    float* out = to + i * length;
    if (!scales.is_blocks) {
      const float scale = scales.data ? *reinterpret_cast<const float*>(scales.data) : 1;
      for (int64_t j = 0; j < length; ++j) out[j] = values[line[j]] * scale;
    } else if (scales.across_lines) {
      const char* of_line =
          scales.data + (scales.line + i) / Scales::kBlock * scales.pitch + scales.position;
      for (int64_t j = 0; j < length; ++j) out[j] = BlockScale(of_line[j]) * values[line[j]];
    } else {
      const char* of_line = scales.data + (scales.line + i) * scales.pitch;
      for (int64_t j = 0; j < length;) {
        const int64_t index = (scales.position + j) / Scales::kBlock;
        const int64_t end = std::min(length, (index + 1) * Scales::kBlock - scales.position);
        const BlockScale scale(of_line[index]);
        for (; j < end; ++j) out[j] = scale * values[line[j]];
      }
    }
  }
}

void WidenTo(const Matrix& block, int64_t num_lines, int64_t length, float* to) {
  switch (block.type) {
    case DataType::kE4M3:
      return WidenScaled<E4M3>(block, num_lines, length, to);
    case DataType::kE5M2:
      return WidenScaled<E5M2>(block, num_lines, length, to);
    case DataType::kBF16:
      return Widen<BF16>(block, num_lines, length, to);
    default:
      return Widen<F16>(block, num_lines, length, to);
  }
}

void WidenTo(const Matrix&, int64_t, int64_t, double*) {}  // float64 has no narrow type

}  // namespace

Matrix Matrix::FromRow(int64_t row) const {
  Matrix rest = *this;
  rest.data += row * (transposed ? 1 : pitch) * ElementBytes(type);
  (transposed ? rest.scales.position : rest.scales.line) += row;
  return rest;
}

Matrix Matrix::FromColumn(int64_t column) const {
  Matrix rest = *this;
  rest.data += column * (transposed ? pitch : 1) * ElementBytes(type);
  (transposed ? rest.scales.line : rest.scales.position) += column;
  return rest;
}

template <typename Wide>
WideBlock<Wide> TakeBlock(const Matrix& matrix, int64_t row, int64_t num_rows, int64_t column,
                          int64_t num_columns, std::vector<Wide>* scratch) {
  const Matrix block = matrix.FromRow(row).FromColumn(column);
  if (ElementBytes(matrix.type) == sizeof(Wide)) {
    return {reinterpret_cast<const Wide*>(block.data), matrix.pitch};
  }
  const int64_t num_lines = matrix.transposed ? num_columns : num_rows;
  const int64_t length = matrix.transposed ? num_rows : num_columns;
  scratch->resize(std::max<size_t>(scratch->size(), num_lines * length));
  WidenTo(block, num_lines, length, scratch->data());
  return {scratch->data(), length};
}

template WideBlock<float> TakeBlock(const Matrix&, int64_t, int64_t, int64_t, int64_t,
                                    std::vector<float>*);
template WideBlock<double> TakeBlock(const Matrix&, int64_t, int64_t, int64_t, int64_t,
                                     std::vector<double>*);

template <typename Wide>
void AddRows(const Matrix& matrix, int64_t num_rows, int64_t num_columns, Wide* out) {
  constexpr int64_t kRows = 64, kColumns = 1024;
  std::vector<Wide> scratch;
  for (int64_t row = 0; row < num_rows; row += kRows) {
    for (int64_t column = 0; column < num_columns; column += kColumns) {
      const int64_t m = std::min(kRows, num_rows - row);
      const int64_t n = std::min(kColumns, num_columns - column);
      const auto block = TakeBlock(matrix, row, m, column, n, &scratch);
      const int64_t by_row = matrix.transposed ? 1 : block.pitch;
      const int64_t by_column = matrix.transposed ? block.pitch : 1;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          out[column + j] += block.data[i * by_row + j * by_column];
        }
      }
    }
  }
}

template void AddRows(const Matrix&, int64_t, int64_t, float*);
template void AddRows(const Matrix&, int64_t, int64_t, double*);

}  // namespace cpd
