// Dispatch and combine over mapped memory; chooses the kernels of a call.
#include <atomic>

#include "cuda/call_kernels.h"
#include "cuda/kernels.h"

namespace cpd {
namespace {

std::atomic<CallLauncher> over_network{nullptr};

constexpr int kHoldThreads = 256;

__global__ void __launch_bounds__(kHoldThreads)
    HoldKernel(const __grid_constant__ HeldFields held) {
  Hold(ThisBlock(), held);
}

}  // namespace

void SetNetworkLauncher(CallLauncher launch) { over_network = launch; }

cudaError_t LaunchCall(const Call& call, int num_blocks, cudaStream_t stream) {
  if (!call.has_network) return LaunchOver<Mapped>(call, num_blocks, stream);
  const CallLauncher launch = over_network;
  return launch ? launch(call, num_blocks, stream) : cudaErrorNotSupported;
}

cudaError_t LaunchHold(const HeldFields& held, cudaStream_t stream) {
  if (held.num == 0) return cudaSuccess;
  HoldKernel<<<held.num, kHoldThreads, 0, stream>>>(held);
  return cudaGetLastError();
}

cudaError_t NumResidentBlocks(int* num_blocks) {
  int device = 0, num_sms = 0;
  cudaFuncAttributes attributes;
  cudaError_t error = LoadKernelsOver<Mapped>();
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, HoldKernel);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  *num_blocks = num_sms * kMoveBlocks;
  return error;
}

}  // namespace cpd
