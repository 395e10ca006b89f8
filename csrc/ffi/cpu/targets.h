// The handlers of this extension, by the names under which JAX registers them.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace cpd {

struct Target {
  const char* name;
  XLA_FFI_Handler* execute;
  bool meets_others = true;  // then it needs a call site
};

std::vector<Target> DispatchTargets();
std::vector<Target> GemmTargets();
std::vector<Target> GroupedGemmTargets();

}  // namespace cpd
