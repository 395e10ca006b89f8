// The handlers of the CUDA module. The initialize stage allocates the memory of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/channels.h"
#include "cuda/memory.h"
#include "ffi/common.h"
#include "ffi/cuda/dispatch_call.h"
#include "ffi/cuda/nccl_window.h"
#include "gpu_schedule/first_meeting.h"
#include "transport/transport.h"

namespace cpd {

constexpr auto kInitialize = xla::ffi::ExecutionStage::kInitialize;
constexpr auto kExecute = xla::ffi::ExecutionStage::kExecute;

// What the executions of a call between GPUs share.
struct CallBetweenGpus : CallState<CallBetweenGpus> {
  static constexpr const char* kTypeName = "jax_cp_dispatch.CallBetweenGpus";
  FirstMeeting meeting;

  static xla::ffi::ErrorOr<std::unique_ptr<CallBetweenGpus>> Make(xla::ffi::Dictionary) {
    return {std::make_unique<CallBetweenGpus>()};
  }
};

// The operands of dispatch, combine and GEMMs, in both stages: those of the CPU handlers.
template <xla::ffi::ExecutionStage kStage>
auto BindOperands() {
  return xla::ffi::Ffi::Bind<kStage>()
      .template Ctx<xla::ffi::DeviceOrdinal>()
      .template Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<xla::ffi::State<CallBetweenGpus>>()
      .template Ctx<xla::ffi::RunId>()  // the same on all GPUs of one execution
      .template Ctx<CallContext>()
      .template Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // rank: place on the axis, on the device
      .template Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // group
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

// A call between GPUs, whose two handlers take these operands.
template <auto kInitializes, auto kExecutes>
Target BetweenGpus(const char* name) {
  return {name, Handle<kExecutes, BindOperands<kExecute>>,
          Handle<kInitializes, BindOperands<kInitialize>>,
          Instantiate<CallBetweenGpus, CallBetweenGpus::Make>};
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
  FirstMeeting* meeting;  // of this call
  int64_t run_id;
  CallContext context;

  // Before a call is enqueued: the other GPUs of this process that take part have initialized the
  // program.
  Status Meet(const std::string& op, const RankLocation& location,
              std::chrono::milliseconds deadline) const {
    if (location.on_one_device) return Status::Ok();
    return meeting->Arrive({op, run_id, location.devices, location.rank, deadline});
  }

  // The status of this stage. If it failed, GPUs that wait for this one fail too.
  Status End(Status status) const {
    if (!status.ok()) FirstMeeting::Refuse(run_id, status);
    return status;
  }
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
