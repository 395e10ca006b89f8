// The handlers of the CUDA extension by the name under which JAX registers them.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace cpd {

struct CudaTarget {
  const char* name;
  XLA_FFI_Handler* initialize;  // makes the memory of a call, before anything is recorded
  XLA_FFI_Handler* execute;
};

std::vector<CudaTarget> CudaDispatchTargets();
std::vector<CudaTarget> CudaGemmTargets();

}  // namespace cpd
