// One call of the grouped GEMM handler: its attributes, buffers, and the product they describe.

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <utility>

#include "ffi/cpu/call_site.h"
#include "ffi/gemm_call.h"
#include "gemm/blas.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

bool HasDims(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> wanted) {
  const auto dims = buffer.dimensions();
  return std::equal(dims.begin(), dims.end(), wanted.begin(), wanted.end());
}

// Returns the first violated invariant of a call, or nullptr.
const char* Wrong(const GroupedGemmOptions& options, const GroupedGemmBuffers& b,
                  GroupedProduct* product) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (options.num_threads < 1 || options.num_threads > kMostThreads) {
    return "num_threads is out of range";
  }
  if (options.scaling_mode != 0 && options.scaling_mode != 1 && options.scaling_mode != 2) {
    return "scaling_mode is out of range";
  }
  const auto left = b.lhs.dimensions(), right = b.rhs.dimensions();
  const bool contracts_rows = options.contracts_rows;
  if (left.size() != 2 || right.size() != (contracts_rows ? 2 : 3)) return "wrong ranks";
  GroupedProduct& p = *product;
  p.num_groups = NumElements(b.group_sizes);
  if (b.group_sizes.dimensions().size() != 1 ||
      !IsArray(b.group_sizes, DataType::kI32, p.num_groups))
    return "group_sizes needs int32";
  p.m = left[0];
  p.k = left[1];
  p.n = contracts_rows ? right[1] : right[options.rhs_transposed ? 1 : 2];
  for (const int64_t size : {p.m, p.n, p.k}) {
    if (size < 0 || size > kMost) return "a dimension is above 2**31 - 1";
  }
  p.contracts_rows = contracts_rows;
  p.rhs_transposed = options.rhs_transposed;
  p.lhs_type = ToRealType(b.lhs.element_type());
  p.rhs_type = ToRealType(b.rhs.element_type());
  p.output_type = ToRealType(b.output.element_type());
  if (!GemmIsSupported(p.lhs_type, p.rhs_type, p.output_type)) return "a type is not supported";
  if (IsByteFloat(p.lhs_type) != (options.scaling_mode != 0)) {
    return "8-bit operands need scales, and others take none";
  }
  const bool fits = contracts_rows     ? HasDims(b.rhs, {p.m, p.n})
                    : p.rhs_transposed ? HasDims(b.rhs, {p.num_groups, p.n, p.k})
                                       : HasDims(b.rhs, {p.num_groups, p.k, p.n});
  if (!fits || !(contracts_rows ? HasDims(b.output, {p.num_groups, p.k, p.n})
                                : HasDims(b.output, {p.m, p.n}))) {
    return "the shapes are inconsistent";
  }
  p.lhs = static_cast<const char*>(b.lhs.untyped_data());
  p.rhs = static_cast<const char*>(b.rhs.untyped_data());
  p.group_sizes = static_cast<const int32_t*>(b.group_sizes.untyped_data());
  p.output = static_cast<char*>(b.output.untyped_data());
  if (options.scaling_mode != 0) {
    for (const auto& [buffer, scales] :
         {std::pair{&b.lhs_scale_inv, &p.lhs_scales}, std::pair{&b.rhs_scale_inv, &p.rhs_scales}}) {
      if (!IsArray(*buffer, DataType::kF32, p.num_groups)) return "wrong scales";
      *scales = static_cast<const float*>(buffer->untyped_data());
    }
  }
  if (options.fuse_bias) {
    if (ToRealType(b.bias.element_type()) != p.output_type ||
        !HasDims(b.bias, {p.num_groups, p.n})) {
      return "wrong bias";
    }
    p.bias = static_cast<const char*>(b.bias.untyped_data());
  }
  return nullptr;
}

}  // namespace

void ReadOptions(AttributeReader* attributes, GroupedGemmOptions* options) {
  AttributeReader& a = *attributes;
  GroupedGemmOptions& o = *options;
  a.Read("op", &o.op);
  a.Read("num_threads", &o.num_threads);
  a.Read("scaling_mode", &o.scaling_mode);
  a.Read("contracts_rows", &o.contracts_rows);
  a.Read("rhs_transposed", &o.rhs_transposed);
  a.Read("fuse_bias", &o.fuse_bias);
}

Status DescribeGrouped(const GroupedGemmOptions& options, const GroupedGemmBuffers& buffers,
                       GroupedProduct* product) {
  const char* wrong = Wrong(options, buffers, product);
  if (wrong == nullptr) return Status::Ok();
  return Status::Invalid(options.op, ": ", wrong, ". Call it through jax_cp_dispatch.");
}

// ---- XLA FFI handler of grouped GEMMs on CPU.

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
  return {{"jax_cp_dispatch.grouped_gemm", GroupedGemmHandler, nullptr,
           Instantiate<GroupedGemmState, MakeState<GroupedGemmState>>}};
}

}  // namespace cpd
