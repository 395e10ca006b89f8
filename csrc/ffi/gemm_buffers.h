// The arrays of a GEMM's custom call, on CPU or a GPU, by name.
#pragma once

#include <string>
#include <vector>

#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

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

}  // namespace cpd
