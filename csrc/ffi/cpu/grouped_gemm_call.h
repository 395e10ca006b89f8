// One call of the grouped GEMM handler: its attributes, buffers, and the product they describe.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/common.h"
#include "gemm/gemm.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

struct GroupedGemmOptions {
  std::string op;  // begins every message
  int64_t num_threads;
  int64_t scaling_mode;
  bool contracts_rows;
  bool rhs_transposed;
  bool fuse_bias;
};

void ReadOptions(AttributeReader* attributes, GroupedGemmOptions* options);

// Absent operands have one element, which is never read.
struct GroupedGemmBuffers {
  xla::ffi::AnyBuffer lhs;
  xla::ffi::AnyBuffer lhs_scale_inv;  // [g]
  xla::ffi::AnyBuffer rhs;
  xla::ffi::AnyBuffer rhs_scale_inv;  // [g]
  xla::ffi::AnyBuffer bias;           // [g, n]
  xla::ffi::AnyBuffer group_sizes;    // [g] of int32
  xla::ffi::AnyBuffer output;
};

// Describes everything but the group sizes. Python has checked the call; this checks only what
// could corrupt memory.
Status DescribeGrouped(const GroupedGemmOptions& options, const GroupedGemmBuffers& buffers,
                       GroupedProduct* product);

}  // namespace cpd
