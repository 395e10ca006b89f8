// The handlers of the CUDA module. The first stage allocates the memory of a call, before anything
// is recorded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/channels.h"
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

// ---- The context of a custom call on a GPU: its device, its rank, and whether its stream is being
// recorded.

// One stage of a custom call on a GPU.
struct StageOnDevice {
  bool executes;  // otherwise it prepares the program
  int32_t device;
  cudaStream_t stream;
};

// Makes `device` current and finds it among `device_table`; see LocateRanks.
Status FindRank(const std::string& op, int32_t device, int64_t num_ranks, Counts device_table,
                RankLocation* location);

bool IsRecorded(cudaStream_t stream);

// Whether each call synchronizes and reports its own errors, instead of leaving them to a later
// call.
bool ChecksEachCall();

// The status of a call that has been enqueued. `message` is an error of an earlier call, or empty.
Status EndCall(const std::string& op, cudaStream_t stream, std::string message, Channel* channel);

}  // namespace cpd
