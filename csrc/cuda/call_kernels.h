// The kernels of dispatch and combine over one fabric: binds kernels/ to a GPU's blocks; blockIdx.y
// is the rank. Included once for each fabric, by a .cu file.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <initializer_list>

#include "kernels/exchange.h"
#include "kernels/plan.h"
#include "kernels/push.h"
#include "kernels/push_take.h"
#include "kernels/small.h"
#include "kernels/sum.h"
#include "kernels/unpack.h"

namespace cpd {
namespace {

using namespace kernels;  // NOLINT: this file is its other half

constexpr int kPlanThreads = 256;
constexpr int kMoveThreads = kMaxThreads;
constexpr int kMeetThreads = kMaxRanks;

__device__ Block ThisBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), static_cast<int>(blockIdx.x),
          static_cast<int>(gridDim.x)};
}

__device__ Rank ThisRank(const Call& call) { return {call, static_cast<int>(blockIdx.y)}; }

// A kernel of a call may start before the one ahead of it on the stream has ended, and waits for it
// here. All threads of all kernels but the first call it, so a kernel's end implies that of all
// before it.
__device__ void AwaitKernelAhead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start. The kernel that waits for other ranks never calls it: blocks of the
// next one would fill the GPU before a rank on another stream has sent.
__device__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Whether the kernel that sends also signals. A network must be quiet first, for all signals.
template <typename Fabric>
constexpr bool kSignalsLast = !Fabric::kHasNetwork;

template <typename Fabric>
__global__ void __launch_bounds__(kPlanThreads, 1) PlanKernel(const __grid_constant__ Call call) {
  __shared__ PlanScratch scratch;
  LetNextStart();
  Prepare<Fabric>(ThisBlock(), ThisRank(call), &scratch);
  if constexpr (kSignalsLast<Fabric>) {
    if (call.is_dispatch || !HoldsAllRanks(call)) return;
    __syncthreads();  // this call sends nothing
    Signal(ThisBlock(), ThisRank(call));
  }
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    PushKernel(const __grid_constant__ Call call) {
  __shared__ PushScratch scratch;
  __shared__ bool is_last;
  LetNextStart();
  AwaitKernelAhead();
  Push<Fabric>(ThisBlock(), ThisRank(call), &scratch);
  if constexpr (kSignalsLast<Fabric>) SignalLast(ThisBlock(), ThisRank(call), &is_last);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    StageKernel(const __grid_constant__ Call call) {
  __shared__ bool is_last;
  LetNextStart();
  AwaitKernelAhead();
  Stage(ThisBlock(), ThisRank(call));
  if constexpr (kSignalsLast<Fabric>) SignalLast(ThisBlock(), ThisRank(call), &is_last);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMeetThreads) WaitKernel(const __grid_constant__ Call call) {
  __shared__ MeetScratch scratch;
  AwaitKernelAhead();
  Wait<Fabric>(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    UnpackKernel(const __grid_constant__ Call call) {
  __shared__ UnpackScratch scratch;
  AwaitKernelAhead();
  Unpack(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    PullKernel(const __grid_constant__ Call call) {
  __shared__ SumScratch scratch;
  AwaitKernelAhead();
  Pull<Fabric>(ThisBlock(), ThisRank(call), &scratch);
}

// ---- For mapped memory only: dispatch between devices, and small calls, each in one kernel.

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks)
    PushTakeKernel(const __grid_constant__ Call call) {
  __shared__ PushTakeScratch scratch;
  LetNextStart();  // a wait: one block
  AwaitKernelAhead();
  RunPushTake(ThisBlock(), ThisRank(call), &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, 1)
    SmallDispatchKernel(const __grid_constant__ Call call) {
  __shared__ SmallScratch scratch;
  RunSmall<true>(ThisBlock(), call, &scratch);
}

template <typename Fabric>
__global__ void __launch_bounds__(kMoveThreads, 1)
    SmallCombineKernel(const __grid_constant__ Call call) {
  __shared__ SmallScratch scratch;
  RunSmall<false>(ThisBlock(), call, &scratch);
}

// ---- For network fabrics only. These kernels start one after another.

template <typename Fabric>
__global__ void __launch_bounds__(kMeetThreads) SignalKernel(const __grid_constant__ Call call) {
  Signal<Fabric>(ThisBlock(), ThisRank(call));
}

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

// Whether the current device has compute capability 9.0: kernels that start early.
inline bool IsNew() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

// Whether kernels may start before the one ahead has ended. Recorded ones start one after another:
// a program that edits the recording may not know such edges.
inline bool MayOverlap(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
  return cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
         capture == cudaStreamCaptureStatusNone;
}

// Launches a call: plan, move and signal, wait and take.
template <typename Fabric>
cudaError_t LaunchOver(const Call& call, int num_blocks, cudaStream_t stream) {
  const bool may_overlap = !Fabric::kHasNetwork && IsNew() && MayOverlap(stream);
  const auto ranks = static_cast<unsigned>(call.num_local);
  const dim3 one(1, ranks);
  const dim3 many(std::max(1u, static_cast<unsigned>(num_blocks) / ranks), ranks);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaError_t error = cudaSuccess;
  const auto launch = [&](void (*kernel)(Call), dim3 blocks, int threads, bool is_first = false) {
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = may_overlap && !is_first ? 1 : 0;
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, call);
  };
  if constexpr (!Fabric::kHasNetwork) {
    if (call.is_small) {
      launch(call.is_dispatch ? SmallDispatchKernel<Fabric> : SmallCombineKernel<Fabric>,
             dim3(NumParts(call)), kMoveThreads, true);
      return error == cudaSuccess ? cudaGetLastError() : error;
    }
  }
  launch(PlanKernel<Fabric>, one, kPlanThreads, true);
  if (call.is_dispatch) {
    if constexpr (Fabric::kHasNetwork) {  // in transit while the rest is copied
      launch(StageToPutKernel<Fabric>, many, kMoveThreads);
      launch(PutKernel<Fabric>, many, kMoveThreads);
    }
    if constexpr (!Fabric::kHasNetwork) {
      launch(HoldsAllRanks(call) ? PushKernel<Fabric> : PushTakeKernel<Fabric>, many, kMoveThreads);
    } else {
      launch(PushKernel<Fabric>, many, kMoveThreads);
    }
  } else if (!HoldsAllRanks(call)) {
    launch(StageKernel<Fabric>, many, kMoveThreads);
  }
  // Signals come from a kernel before the wait: if one device holds all ranks, all of them have
  // signalled before any waits, however few blocks run at once.
  if constexpr (!kSignalsLast<Fabric>) launch(SignalKernel<Fabric>, one, kMeetThreads);
  launch(WaitKernel<Fabric>, one, kMeetThreads);
  if (call.is_dispatch) {
    launch(UnpackKernel<Fabric>, many, kMoveThreads);
  } else {
    if constexpr (Fabric::kHasNetwork) {
      launch(FetchKernel<Fabric>, many, kMoveThreads);
      launch(QuietKernel<Fabric>, dim3(1), 1);
    }
    launch(PullKernel<Fabric>, many, kMoveThreads);
  }
  return error == cudaSuccess ? cudaGetLastError() : error;
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
  load({PlanKernel<Fabric>, PushKernel<Fabric>, StageKernel<Fabric>, WaitKernel<Fabric>,
        UnpackKernel<Fabric>, PullKernel<Fabric>});
  if constexpr (Fabric::kHasNetwork) {
    load({SignalKernel<Fabric>, StageToPutKernel<Fabric>, PutKernel<Fabric>, FetchKernel<Fabric>,
          QuietKernel<Fabric>});
  } else {
    load({PushTakeKernel<Fabric>, SmallDispatchKernel<Fabric>, SmallCombineKernel<Fabric>});
  }
  return error;
}

}  // namespace
}  // namespace cpd
