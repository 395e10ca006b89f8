// The handlers of the CPU module. The first stage makes the state; see call_state.h.
#pragma once

#include <vector>

#include "ffi/common.h"

namespace cpd {

std::vector<Target> DispatchTargets();
std::vector<Target> GemmTargets();
std::vector<Target> GroupedGemmTargets();

}  // namespace cpd
