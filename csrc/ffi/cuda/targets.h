// The handlers of the CUDA module. The first stage allocates the memory of a call, before anything
// is recorded.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ffi/common.h"

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

std::vector<Target> CudaAttentionTargets();
std::vector<Target> CudaDispatchTargets();
std::vector<Target> CudaGemmTargets();

}  // namespace cpd
