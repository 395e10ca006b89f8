// Grouped GEMM: one product per group of rows; group sizes are known only at run time.
#pragma once

#include <cstdint>
#include <string>

#include "gemm/gemm.h"
#include "transport/transport.h"

namespace cpd {

// Rows are sorted by group. By default output [m, n] is each group's rows times its own matrix, rhs
// [g, k, n] or, transposed, [g, n, k], + bias [g, n]; rows after the last group become zero. With
// `contracts_rows`, lhs [m, k] and rhs [m, n] give output [g, k, n].
struct GroupedProduct {
  int64_t num_groups = 0, m = 0, n = 0, k = 0;
  bool contracts_rows = false;
  bool rhs_transposed = false;
  DataType lhs_type = DataType::kOther, rhs_type = DataType::kOther, output_type = DataType::kOther;
  const char* lhs = nullptr;
  const char* rhs = nullptr;
  const float* lhs_scales = nullptr;  // [g], or nullptr
  const float* rhs_scales = nullptr;
  const char* bias = nullptr;
  const int32_t* group_sizes = nullptr;  // [g]
  char* output = nullptr;
};

// Rejects negative group sizes, and sums above the number of rows, before it writes. Deterministic.
Status RunGroupedGemm(const std::string& op, const GroupedProduct& product, int num_threads);

}  // namespace cpd
