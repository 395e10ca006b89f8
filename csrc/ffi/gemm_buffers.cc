// The arrays of a GEMM's custom call: reads them in their order.
#include "ffi/gemm_buffers.h"

namespace ffi = xla::ffi;

namespace cpd {

Status ReadArrays(const std::string& op, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& results, std::vector<ffi::AnyBuffer>* arrays) {
  constexpr size_t kNumArgs = 7, kNumResults = 7;
  const auto wrong = [&op](const char* what) {
    return Status::Invalid(op, ": the operands are not those of this version's primitives: ", what,
                           ". Call it through jax_cp_dispatch.");
  };
  if (args.size() != kNumArgs || results.size() != kNumResults) {
    return wrong("their number is wrong");
  }
  for (size_t i = 0; i < kNumArgs; ++i) {
    const auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return wrong("one is not an array");
    arrays->push_back(*arg);
  }
  for (size_t i = 0; i < kNumResults; ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return wrong("a result is not an array");
    arrays->push_back(**result);
  }
  return {};
}

GemmBuffers BuffersOf(const std::vector<ffi::AnyBuffer>& arrays) {
  const auto& a = arrays;
  return {a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]};
}

}  // namespace cpd
