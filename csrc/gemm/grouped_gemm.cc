// Grouped GEMM: one product per group of rows; group sizes are known only at run time.
#include "gemm/grouped_gemm.h"

#include <algorithm>

namespace cpd {
namespace {

Scales TensorScale(const float* scales, int64_t group) {
  Scales scale;
  if (scales) scale.data = reinterpret_cast<const char*>(scales + group);
  return scale;
}

GemmTask TaskOf(const GroupedProduct& p, int64_t group, int64_t begin, int64_t num_rows) {
  const int64_t output_bytes = ElementBytes(p.output_type), rhs_bytes = ElementBytes(p.rhs_type);
  const Scales of_lhs = TensorScale(p.lhs_scales, group), of_rhs = TensorScale(p.rhs_scales, group);
  GemmTask task;
  task.n = task.c_pitch = p.n;
  task.c_type = p.output_type;
  const char* rows = p.lhs + begin * p.k * ElementBytes(p.lhs_type);
  task.a = {rows, p.lhs_type, p.k, p.contracts_rows, of_lhs};
  if (p.contracts_rows) {
    task.m = p.k;
    task.k = num_rows;
    task.b = {p.rhs + begin * p.n * rhs_bytes, p.rhs_type, p.n, false, of_rhs};
    task.c = p.output + group * p.k * p.n * output_bytes;
  } else {
    task.m = num_rows;
    task.k = p.k;
    task.b = {p.rhs + group * p.k * p.n * rhs_bytes, p.rhs_type, p.rhs_transposed ? p.k : p.n,
              p.rhs_transposed, of_rhs};
    task.c = p.output + begin * p.n * output_bytes;
    if (p.bias) task.epilogue.bias = p.bias + group * p.n * output_bytes;
  }
  return task;
}

}  // namespace

Status RunGroupedGemm(const std::string& op, const GroupedProduct& p, int num_threads) {
  int64_t total = 0;
  for (int64_t group = 0; group < p.num_groups; ++group) {
    const int64_t size = p.group_sizes[group];
    total += size;
    if (size < 0 || total > p.m) {
      const std::string why = size < 0
                                  ? ", but a group has at least 0 rows."
                                  : ", so that the groups up to it have " + std::to_string(total) +
                                        " rows, but there are " + std::to_string(p.m) + ".";
      return Status::Invalid(op, ": group_sizes[", group, "] is ", size, why,
                             " Pass the rows of each group, in their order.");
    }
  }
  int64_t begin = 0;
  for (int64_t group = 0; group < p.num_groups; ++group) {
    const int64_t size = p.group_sizes[group];
    RunGemm(TaskOf(p, group, begin, size), num_threads);
    begin += size;
  }
  if (!p.contracts_rows) {
    const int64_t row_bytes = p.n * ElementBytes(p.output_type);
    std::fill(p.output + begin * row_bytes, p.output + p.m * row_bytes, 0);
  }
  return Status::Ok();
}

}  // namespace cpd
