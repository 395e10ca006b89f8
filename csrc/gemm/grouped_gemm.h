// A product per group of rows, whose sizes are known only when it runs.
#pragma once

#include <cstdint>
#include <string>

#include "gemm/gemm.h"
#include "transport/transport.h"

namespace cpd {

// Rows stand group after group. Either output [m, n]: each group's rows times its own matrix, rhs
// [g, k, n] or, transposed, [g, n, k], + bias [g, n]; rows behind the last group become zero. Or,
// if rows are contracted, lhs [m, k] and rhs [m, n] to output [g, k, n].
struct GroupedProduct {
  int64_t num_groups = 0, m = 0, n = 0, k = 0;
  bool contracts_rows = false;
  bool rhs_transposed = false;
  DataType lhs_type = DataType::kOther, rhs_type = DataType::kOther, output_type = DataType::kOther;
  const char* lhs = nullptr;
  const char* rhs = nullptr;
  const float* lhs_scales = nullptr;  // [g], or none
  const float* rhs_scales = nullptr;
  const char* bias = nullptr;
  const int32_t* group_sizes = nullptr;  // [g]
  char* output = nullptr;
};

// Refuses sizes that are negative or more than the rows before it writes. Repeatable.
Status RunGroupedGemm(const std::string& op, const GroupedProduct& product, int num_threads);

}  // namespace cpd
