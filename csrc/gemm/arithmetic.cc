// The arithmetic of a schedule on CPU.
#include "gemm/arithmetic.h"

#include <algorithm>

#include "numerics/sum_rows.h"
#include "transport/team.h"

namespace cpd {
namespace {

// out = the sum of the sources in order (+ bias), rounded once.
void SumAndRound(const std::vector<const char*>& sources, DataType type, const char* bias,
                 int64_t num_elements, DataType out_type, char* out) {
  const DataType sum_type = AccumulationType(type);
  if (sum_type == out_type && bias == nullptr) {
    SumRows({type, sum_type}, sources, num_elements, out);
    return;
  }
  constexpr int64_t kTile = 2048;  // the sums stay in the first-level cache
  alignas(64) char sums[kTile * sizeof(double)];
  std::vector<const char*> tile(sources.size());
  const int64_t bytes = ElementBytes(type), out_bytes = ElementBytes(out_type);
  for (int64_t begin = 0; begin < num_elements; begin += kTile) {
    const int64_t n = std::min(kTile, num_elements - begin);
    for (size_t i = 0; i < tile.size(); ++i) tile[i] = sources[i] + begin * bytes;
    SumRows({type, sum_type}, tile, n, sums);
    Epilogue epilogue;
    if (bias) epilogue.bias = bias + begin * out_bytes;
    char* to = out + begin * out_bytes;
    if (sum_type == DataType::kF64) {
      StoreRow(out_type, reinterpret_cast<const double*>(sums), epilogue, n, to);
    } else {
      StoreRow(out_type, reinterpret_cast<const float*>(sums), epilogue, n, to);
    }
  }
}

}  // namespace

void HostArithmetic::Sum(const SumTask& task) const {
  const int64_t bytes = ElementBytes(task.type), to_bytes = ElementBytes(task.to_type);
  // Rows without gaps between them count as one row.
  const bool is_one =
      task.pitch == task.num_columns && task.to_pitch == task.num_columns && task.bias == nullptr;
  const int64_t rows_at_once = is_one ? std::max<int64_t>(task.num_rows, 1) : 1;
  std::vector<const char*> parts(task.sources.size());
  if (task.num_columns == 0) return;
  for (int64_t row = 0; row < task.num_rows; row += rows_at_once) {
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] = task.sources[i] + row * task.pitch * bytes;
    }
    SumAndRound(parts, task.type, task.bias, rows_at_once * task.num_columns, task.to_type,
                task.to + row * task.to_pitch * to_bytes);
  }
}

void HostArithmetic::Copy(const std::vector<RowCopy>& copies) const { CopyRows(copies); }

void HostArithmetic::Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const {
  if (row_bytes == 0) return;
  for (int64_t row = 0; row < num_rows; ++row) std::fill_n(rows + row * pitch, row_bytes, 0);
}

}  // namespace cpd
