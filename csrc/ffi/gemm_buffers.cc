// The arrays of a GEMM's custom call: reads them in their order.
#include "ffi/gemm_buffers.h"

#include "ffi/common.h"

namespace ffi = xla::ffi;

namespace cpd {

Status ReadArrays(const std::string& op, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& results, std::vector<ffi::AnyBuffer>* arrays) {
  constexpr size_t kNumArgs = 7, kNumResults = 7;
  if (args.size() != kNumArgs || results.size() != kNumResults) {
    return NotOurs(op, "their number is wrong");
  }
  for (size_t i = 0; i < kNumArgs; ++i) {
    const auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return NotOurs(op, "one is not an array");
    arrays->push_back(*arg);
  }
  for (size_t i = 0; i < kNumResults; ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return NotOurs(op, "a result is not an array");
    arrays->push_back(**result);
  }
  return {};
}

GemmBuffers BuffersOf(const std::vector<ffi::AnyBuffer>& arrays) {
  const auto& a = arrays;
  return {a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]};
}

}  // namespace cpd
