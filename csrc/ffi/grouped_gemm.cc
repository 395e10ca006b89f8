// XLA FFI handler of grouped GEMMs on CPU.
#include "gemm/grouped_gemm.h"

#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "ffi/common.h"
#include "ffi/targets.h"
#include "gemm/blas.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// Of what Python never passes; nullptr: all is well.
const char* Wrong(const GroupedProduct& p, const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs,
                  const ffi::AnyBuffer& output) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (p.m > kMost || p.n > kMost || p.k > kMost) return "a dimension is above 2**31 - 1";
  if (!GemmIsSupported(p.lhs_type, p.rhs_type, p.output_type)) return "a type is not supported";
  if (IsByteFloat(p.lhs_type) != (p.lhs_scales != nullptr)) {
    return "8-bit operands and scales go together";
  }
  const int64_t of_groups = p.num_groups * p.k * p.n, rows = p.m * p.n;
  if (!IsArray(lhs, p.lhs_type, p.m * p.k) ||
      !IsArray(rhs, p.rhs_type, p.contracts_rows ? rows : of_groups) ||
      !IsArray(output, p.output_type, p.contracts_rows ? of_groups : rows)) {
    return "shapes do not fit each other";
  }
  return nullptr;
}

ffi::Error GroupedGemm(ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale_inv, ffi::AnyBuffer rhs,
                       ffi::AnyBuffer rhs_scale_inv, ffi::AnyBuffer bias,
                       ffi::BufferR1<ffi::S32> group_sizes, ffi::Result<ffi::AnyBuffer> output,
                       std::string_view op, int64_t num_threads, int64_t scaling_mode,
                       bool contracts_rows, bool rhs_transposed, bool fuse_bias,
                       [[maybe_unused]] bool use_split_accumulator) {
  try {
    const std::string name(op);
    const auto refuse = [&](const char* wrong) {
      return ToError(Status::Invalid(name + ": " + wrong + ". Call it through jax_cp_dispatch."));
    };
    if (!BlasIsLoaded()) return refuse("no BLAS is loaded");
    const auto left = lhs.dimensions(), right = rhs.dimensions();
    if (left.size() != 2 || right.size() != (contracts_rows ? 2 : 3)) return refuse("wrong ranks");
    GroupedProduct p;
    p.num_groups = static_cast<int64_t>(group_sizes.element_count());
    p.m = left[0];
    p.k = left[1];
    p.n = contracts_rows ? right[1] : right[rhs_transposed ? 1 : 2];
    p.contracts_rows = contracts_rows;
    p.rhs_transposed = rhs_transposed;
    p.lhs_type = ToDataType(lhs.element_type());
    p.rhs_type = ToDataType(rhs.element_type());
    p.output_type = ToDataType(output->element_type());
    p.lhs = static_cast<const char*>(lhs.untyped_data());
    p.rhs = static_cast<const char*>(rhs.untyped_data());
    p.group_sizes = group_sizes.typed_data();
    p.output = static_cast<char*>(output->untyped_data());
    if (scaling_mode != 0) {
      for (const auto& [buffer, scales] :
           {std::pair{&lhs_scale_inv, &p.lhs_scales}, std::pair{&rhs_scale_inv, &p.rhs_scales}}) {
        if (!IsArray(*buffer, DataType::kF32, p.num_groups)) return refuse("wrong scales");
        *scales = static_cast<const float*>(buffer->untyped_data());
      }
    }
    if (fuse_bias) {
      if (!IsArray(bias, p.output_type, p.num_groups * p.n)) return refuse("wrong bias");
      p.bias = static_cast<const char*>(bias.untyped_data());
    }
    if (const char* wrong = Wrong(p, lhs, rhs, *output)) return refuse(wrong);
    const Status status = RunGroupedGemm(name, p, static_cast<int>(num_threads));
    return status.ok() ? ffi::Error::Success() : ToError(status);
  } catch (const std::exception& error) {
    return ToError({StatusCode::kInternal, std::string("jax_cp_dispatch: ") + error.what()});
  }
}

XLA_FFI_DEFINE_HANDLER(GroupedGemmHandler, GroupedGemm,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()           // lhs
                           .Arg<ffi::AnyBuffer>()           // lhs_scale_inv [g]
                           .Arg<ffi::AnyBuffer>()           // rhs
                           .Arg<ffi::AnyBuffer>()           // rhs_scale_inv [g]
                           .Arg<ffi::AnyBuffer>()           // bias [g, n]
                           .Arg<ffi::BufferR1<ffi::S32>>()  // group_sizes [g]
                           .Ret<ffi::AnyBuffer>()           // output
                           .Attr<std::string_view>("op")
                           .Attr<int64_t>("num_threads")
                           .Attr<int64_t>("scaling_mode")
                           .Attr<bool>("contracts_rows")
                           .Attr<bool>("rhs_transposed")
                           .Attr<bool>("fuse_bias")
                           .Attr<bool>("use_split_accumulator"));

}  // namespace

std::vector<Target> GroupedGemmTargets() {
  return {{"jax_cp_dispatch.grouped_gemm", GroupedGemmHandler, /*meets_others=*/false}};
}

}  // namespace cpd
