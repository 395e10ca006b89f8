// XLA FFI handler of grouped GEMMs on CPU.
#include <cstdint>
#include <string>

#include "ffi/common.h"
#include "ffi/cpu/call_state.h"
#include "ffi/cpu/grouped_gemm_call.h"
#include "ffi/cpu/targets.h"
#include "gemm/blas.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

struct GroupedGemmState : CallState<GroupedGemmState> {
  static constexpr char kTypeName[] = "jax_cp_dispatch.GroupedGemm";
  GroupedGemmOptions options;

  void Read(AttributeReader* attributes) { ReadOptions(attributes, &options); }
};

ffi::Error GroupedGemm(const GroupedGemmState* state, ffi::AnyBuffer lhs,
                       ffi::AnyBuffer lhs_scale_inv, ffi::AnyBuffer rhs,
                       ffi::AnyBuffer rhs_scale_inv, ffi::AnyBuffer bias,
                       ffi::AnyBuffer group_sizes, ffi::Result<ffi::AnyBuffer> output) {
  return ToError(Caught([&] {
    const GroupedGemmOptions& options = state->options;
    if (!BlasIsLoaded()) {
      return Status::Invalid(options.op, ": no BLAS is loaded. Call it through jax_cp_dispatch.");
    }
    GroupedProduct product;
    const GroupedGemmBuffers buffers{lhs,  lhs_scale_inv, rhs,    rhs_scale_inv,
                                     bias, group_sizes,   *output};
    const Status status = DescribeGrouped(options, buffers, &product);
    if (!status.ok()) return status;
    return RunGroupedGemm(options.op, product, static_cast<int>(options.num_threads));
  }));
}

XLA_FFI_DEFINE_HANDLER(GroupedGemmHandler, GroupedGemm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<GroupedGemmState>>()
                           .Arg<ffi::AnyBuffer>()    // lhs
                           .Arg<ffi::AnyBuffer>()    // lhs_scale_inv [g]
                           .Arg<ffi::AnyBuffer>()    // rhs
                           .Arg<ffi::AnyBuffer>()    // rhs_scale_inv [g]
                           .Arg<ffi::AnyBuffer>()    // bias [g, n]
                           .Arg<ffi::AnyBuffer>()    // group_sizes [g]
                           .Ret<ffi::AnyBuffer>());  // output

}  // namespace

std::vector<Target> GroupedGemmTargets() {
  return {{"jax_cp_dispatch.grouped_gemm", Instantiate<GroupedGemmState>, GroupedGemmHandler}};
}

}  // namespace cpd
