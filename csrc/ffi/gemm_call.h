// One call of the GEMM handler, on CPU or a GPU: its arrays, attributes, and the problem.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/common.h"
#include "gemm/comm_overlap.h"
#include "gemm/gemm.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// ---- The arrays of a GEMM's custom call, on CPU or a GPU, by name.

// The operands and the results, in the order of the custom call. Absent ones have one element,
// which is never read. On CPU the workspace has the type of partial sums.
struct GemmBuffers {
  xla::ffi::AnyBuffer lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, gelu_input, aux_in;
  xla::ffi::AnyBuffer output, bias_grad, pre_gelu_out, aux_out, lhs_swizzled, rhs_swizzled,
      workspace;
};

// Reads all arrays of a call. Rejects another number of them.
Status ReadArrays(const std::string& op, const xla::ffi::RemainingArgs& args,
                  const xla::ffi::RemainingRets& results, std::vector<xla::ffi::AnyBuffer>* arrays);
GemmBuffers BuffersOf(const std::vector<xla::ffi::AnyBuffer>& arrays);

// ---- One call of the GEMM handler: its attributes, and the problem that they describe.

constexpr int64_t kMostThreads = 1 << 16;  // of one rank

// The attributes of a call.
struct GemmOptions : RankOptions {
  static constexpr char kTypeName[] = "jax_cp_dispatch.Gemm";
  OverlapProblem problem;  // what they say of it, without arrays; the method and type are below
  int64_t num_threads;     // of one rank
  int64_t scaling_mode;
  int64_t comm_overlap_method;
  int64_t comm_type;
  int64_t comm_overlap_id;  // 0: the workspace is the buffer
  int64_t lhs_axis_boundary;
  int64_t rhs_axis_boundary;
  int64_t aux_axis_boundary;
  bool fuse_bias;
  bool grad;  // for epilogues: the bias gradient, GELU's derivative
};

// Reads the attributes that CPU and GPU calls have in common.
void ReadOptions(AttributeReader* attributes, GemmOptions* options);

// Describes the problem, without its memory. Python has checked the call; this checks only what
// could corrupt memory or hang.
Status Describe(const std::string& op, const GemmOptions& options, const GemmBuffers& buffers,
                OverlapProblem* problem);

RankMemory MemoryOf(const GemmOptions& options, const OverlapProblem& problem,
                    const GemmBuffers& buffers);

// ---- One call of the grouped GEMM handler: its attributes, buffers, and the product they
// describe.

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
