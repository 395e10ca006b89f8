// The handlers of the CUDA module. The first stage allocates the memory of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/channels.h"
#include "cuda/memory.h"
#include "ffi/common.h"
#include "ffi/cuda/dispatch_call.h"
#include "transport/transport.h"

namespace cpd {

constexpr auto kInitialize = xla::ffi::ExecutionStage::kInitialize;
constexpr auto kExecute = xla::ffi::ExecutionStage::kExecute;

// The operands of dispatch, combine and GEMMs, in both stages: those of the CPU handlers.
template <xla::ffi::ExecutionStage kStage>
auto BindOperands() {
  return xla::ffi::Ffi::Bind<kStage>()
      .template Ctx<xla::ffi::DeviceOrdinal>()
      .template Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .template Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // rank: place on the axis, on the device
      .template Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // group
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

std::vector<Target> CudaAttentionTargets();
std::vector<Target> CudaDispatchTargets();
std::vector<Target> CudaGemmTargets();

// ---- The context of a custom call on a GPU: its device and its rank.

// One stage of a custom call on a GPU.
struct StageOnDevice {
  bool executes;  // otherwise it prepares the program
  int32_t device;
  cudaStream_t stream;
};

// Makes `device` current and finds it among `device_table`; see LocateRanks.
inline Status FindRank(const std::string& op, int32_t device, int64_t num_ranks,
                       Counts device_table, RankLocation* location) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    return Status::Internal(op, ": cannot use GPU ", device, ": ", cudaGetErrorString(error));
  }
  auto& registry = ChannelRegistry::Get();
  Status status = LocateRanks(op, registry.NameOf(device), num_ranks, device_table, location);
  for (int64_t& entry : location->devices) entry = registry.ToOrdinal(entry);
  return status;
}

// Whether each call synchronizes and reports its own errors, instead of leaving them to a later
// call.
inline bool ChecksEachCall() {
  static const bool checks = [] {
    const char* value = std::getenv("JAX_CP_DISPATCH_CHECK");
    return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
  }();
  return checks;
}

// The status of a call that has been enqueued. `message` is an error of an earlier call, or empty.
inline Status EndCall(const std::string& op, cudaStream_t stream, std::string message,
                      Channel* channel) {
  if (ChecksEachCall()) {
    const Status status = CudaStatus(cudaStreamSynchronize(stream), op, ": the call");
    if (!status.ok()) return status;
    if (message.empty()) message = channel->TakeError(op);
  }
  return message.empty() ? Status::Ok() : Status::Invalid(message);
}

}  // namespace cpd
