// The handlers of this extension, by the names under which JAX registers them.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace cpd {

struct Target {
  const char* name;
  XLA_FFI_Handler* instantiate;  // makes the state; see call_state.h
  XLA_FFI_Handler* execute;
};

std::vector<Target> DispatchTargets();
std::vector<Target> GemmTargets();
std::vector<Target> GroupedGemmTargets();

}  // namespace cpd
