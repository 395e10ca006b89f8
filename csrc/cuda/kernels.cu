// The kernels of dispatch and combine: device/ bound to a GPU's blocks; blockIdx.y is the rank.
#include <algorithm>

#include "cuda/kernels.h"
#include "device/exchange.h"
#include "device/plan.h"
#include "device/push.h"
#include "device/sum.h"

namespace cpd {
namespace {

using namespace device;  // NOLINT: this file is its other half

constexpr int kPlanThreads = 256;
constexpr int kMoveThreads = 512;
constexpr int kMeetThreads = kMaxRanks;

__device__ Block ThisBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), static_cast<int>(blockIdx.x),
          static_cast<int>(gridDim.x)};
}

__device__ Rank ThisRank(const Call& call) { return {call, static_cast<int>(blockIdx.y)}; }

__global__ void __launch_bounds__(kPlanThreads) PlanKernel(const __grid_constant__ Call call) {
  __shared__ PlanScratch scratch;
  Prepare(ThisBlock(), ThisRank(call), &scratch);
}

__global__ void __launch_bounds__(kMoveThreads, 1) PushKernel(const __grid_constant__ Call call) {
  __shared__ PushScratch scratch;
  Push(ThisBlock(), ThisRank(call), &scratch);
}

__global__ void __launch_bounds__(kMoveThreads, 1) StageKernel(const __grid_constant__ Call call) {
  Stage(ThisBlock(), ThisRank(call));
}

__global__ void __launch_bounds__(kMeetThreads) SignalKernel(const __grid_constant__ Call call) {
  Signal(ThisBlock(), ThisRank(call));
}

__global__ void __launch_bounds__(kMeetThreads) WaitKernel(const __grid_constant__ Call call) {
  __shared__ MeetScratch scratch;
  Wait(ThisBlock(), ThisRank(call), &scratch);
}

__global__ void __launch_bounds__(kMoveThreads, 1) UnpackKernel(const __grid_constant__ Call call) {
  __shared__ UnpackScratch scratch;
  Unpack(ThisBlock(), ThisRank(call), &scratch);
}

__global__ void __launch_bounds__(kMoveThreads, 1) PullKernel(const __grid_constant__ Call call) {
  __shared__ SumScratch scratch;
  Pull(ThisBlock(), ThisRank(call), &scratch);
}

}  // namespace

cudaError_t LaunchCall(const Call& call, int num_blocks, cudaStream_t stream) {
  const auto ranks = static_cast<unsigned>(call.num_local);
  const dim3 one(1, ranks);
  const dim3 many(std::max(1u, static_cast<unsigned>(num_blocks) / ranks), ranks);
  PlanKernel<<<one, kPlanThreads, 0, stream>>>(call);
  if (call.is_dispatch) {
    PushKernel<<<many, kMoveThreads, 0, stream>>>(call);
  } else {
    StageKernel<<<many, kMoveThreads, 0, stream>>>(call);
  }
  // Apart from the wait: where one device holds all ranks, all of them have signalled before any
  // waits, however few blocks run at once.
  SignalKernel<<<one, kMeetThreads, 0, stream>>>(call);
  WaitKernel<<<one, kMeetThreads, 0, stream>>>(call);
  if (call.is_dispatch) {
    UnpackKernel<<<many, kMoveThreads, 0, stream>>>(call);
  } else {
    PullKernel<<<many, kMoveThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

namespace {

// Loads every kernel now: loading one when it is first launched may wait for the device, on which a
// rank may be waiting for the one that loads.
cudaError_t LoadKernels() {
  cudaError_t error = cudaSuccess;
  cudaFuncAttributes attributes;
  for (auto* kernel :
       {PlanKernel, PushKernel, StageKernel, SignalKernel, WaitKernel, UnpackKernel, PullKernel}) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
}

}  // namespace

cudaError_t NumResidentBlocks(int* num_blocks) {
  int device = 0, num_sms = 0, per_sm = 0;
  cudaError_t error = LoadKernels();
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, PushKernel, kMoveThreads, 0);
  }
  *num_blocks = std::max(1, num_sms * per_sm);
  return error;
}

}  // namespace cpd
