// The kernels of dispatch and combine over one fabric: binds kernels/ to a GPU's blocks; blockIdx.y
// is the rank. Included once for each fabric, by a .cu file.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <initializer_list>

#include "kernels/exchange.h"
#include "kernels/network.h"
#include "kernels/plan.h"
#include "kernels/push.h"
#include "kernels/sum.h"

namespace cpd {
namespace {

using namespace kernels;  // NOLINT: this file is its other half

constexpr int kPlanThreads = 256;
constexpr int kMoveThreads = kMaxThreads;
constexpr int kMoveBlocks = 2;  // of one multiprocessor, at least
constexpr int kMeetThreads = kMaxRanks;

__device__ Block ThisBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), static_cast<int>(blockIdx.x),
          static_cast<int>(gridDim.x)};
}

__device__ Rank ThisRank(const Call& call) { return {call, static_cast<int>(blockIdx.y)}; }

template <typename Fabric>
__global__ void __launch_bounds__(kPlanThreads) PlanKernel(const __grid_constant__ Call call) {
  __shared__ PlanScratch scratch;
  Prepare<Fabric>(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    PushKernel(const __grid_constant__ Call call) {
  __shared__ PushScratch scratch;
  Push<Fabric>(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    StageKernel(const __grid_constant__ Call call) {
  Stage(ThisBlock(), ThisRank(call));
}

template <typename Fabric>
__global__ void __launch_bounds__(kMeetThreads) SignalKernel(const __grid_constant__ Call call) {
  Signal<Fabric>(ThisBlock(), ThisRank(call));
}

template <typename Fabric>
__global__ void __launch_bounds__(kMeetThreads) WaitKernel(const __grid_constant__ Call call) {
  __shared__ MeetScratch scratch;
  Wait<Fabric>(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    UnpackKernel(const __grid_constant__ Call call) {
  __shared__ UnpackScratch scratch;
  Unpack(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    PullKernel(const __grid_constant__ Call call) {
  __shared__ SumScratch scratch;
  Pull<Fabric>(ThisBlock(), ThisRank(call), &scratch);
}

// ---- For network fabrics only.

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    StageToPutKernel(const __grid_constant__ Call call) {
  StageToPut(ThisBlock(), ThisRank(call));
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    PutKernel(const __grid_constant__ Call call) {
  Put<Fabric>(ThisBlock(), ThisRank(call));
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    FetchKernel(const __grid_constant__ Call call) {
  Fetch<Fabric>(ThisBlock(), ThisRank(call));
}

template <typename Fabric>
__global__ void QuietKernel(const __grid_constant__ Call) {
  Fabric::Quiet();
}

// Launches a call: plan, move, exchange signals, take.
template <typename Fabric>
cudaError_t LaunchOver(const Call& call, int num_blocks, cudaStream_t stream) {
  const auto ranks = static_cast<unsigned>(call.num_local);
  const dim3 one(1, ranks);
  const dim3 many(std::max(1u, static_cast<unsigned>(num_blocks) / ranks), ranks);
  PlanKernel<Fabric><<<one, kPlanThreads, 0, stream>>>(call);
  if (call.is_dispatch) {
    if constexpr (Fabric::kHasNetwork) {  // in transit while the rest is copied
      StageToPutKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
      PutKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
    }
    PushKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
  } else if (!HoldsAllRanks(call)) {
    StageKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
  }
  // Separate from the wait: if one device holds all ranks, all of them have signalled before any
  // waits, however few blocks run at once.
  SignalKernel<Fabric><<<one, kMeetThreads, 0, stream>>>(call);
  WaitKernel<Fabric><<<one, kMeetThreads, 0, stream>>>(call);
  if (call.is_dispatch) {
    UnpackKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
  } else {
    if constexpr (Fabric::kHasNetwork) {
      FetchKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
      QuietKernel<Fabric><<<1, 1, 0, stream>>>(call);
    }
    PullKernel<Fabric><<<many, kMoveThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

// Loads every kernel now. Loading a kernel at its first launch may wait for the device, where a
// rank may be waiting for the one that loads.
template <typename Fabric>
cudaError_t LoadKernelsOver() {
  using Kernel = void (*)(Call);
  cudaError_t error = cudaSuccess;
  const auto load = [&](std::initializer_list<Kernel> kernels) {
    cudaFuncAttributes attributes;
    for (const Kernel kernel : kernels) {
      if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    }
  };
  load({PlanKernel<Fabric>, PushKernel<Fabric>, StageKernel<Fabric>, SignalKernel<Fabric>,
        WaitKernel<Fabric>, UnpackKernel<Fabric>, PullKernel<Fabric>});
  if constexpr (Fabric::kHasNetwork) {
    load({StageToPutKernel<Fabric>, PutKernel<Fabric>, FetchKernel<Fabric>, QuietKernel<Fabric>});
  }
  return error;
}

}  // namespace
}  // namespace cpd
