// The handlers of the CUDA extension, by the names under which JAX registers them.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace cpd {

constexpr auto kInitialize = xla::ffi::ExecutionStage::kInitialize;
constexpr auto kExecute = xla::ffi::ExecutionStage::kExecute;

// The first operands of every handler, in both stages; attributes follow.
template <xla::ffi::ExecutionStage kStage>
auto BindOperands() {
  return xla::ffi::Ffi::Bind<kStage>()
      .template Ctx<xla::ffi::DeviceOrdinal>()
      .template Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .template Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // rank: place on the axis, on the device
      .template Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // group
      .RemainingArgs()
      .RemainingRets();
}

struct CudaTarget {
  const char* name;
  XLA_FFI_Handler* initialize;  // allocates the memory of a call, before anything is recorded
  XLA_FFI_Handler* execute;
};

std::vector<CudaTarget> CudaAttentionTargets();
std::vector<CudaTarget> CudaDispatchTargets();
std::vector<CudaTarget> CudaGemmTargets();

}  // namespace cpd
