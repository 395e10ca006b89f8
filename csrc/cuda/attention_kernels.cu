// Binds kernels/attend.h and kernels/attention_gradients.h to a GPU's blocks.
#include "cuda/attention_kernels.h"

namespace cpd {
namespace {

using namespace kernels;  // NOLINT: this file is its other half

extern __shared__ __align__(1024) unsigned char block_memory[];

template <int H>
__global__ void __launch_bounds__(kAttentionThreads, kHasWarpgroups ? 3 : 1)
    AttendKernel(const __grid_constant__ AttendCall call) {
  AsyncCopies copies;
  Attend<H>(call, blockIdx.x, reinterpret_cast<AttendScratch<H>*>(block_memory), &copies);
}

template <int H>
__global__ void __launch_bounds__(kAttentionThreads)
    QueryGradientsKernel(const __grid_constant__ GradientsCall call) {
  AsyncCopies copies;
  GradientsOfQueries<H>(call, blockIdx.x, reinterpret_cast<QueriesScratch<H>*>(block_memory),
                        &copies);
}

template <int H>
__global__ void __launch_bounds__(kAttentionThreads)
    KeyGradientsKernel(const __grid_constant__ GradientsCall call) {
  AsyncCopies copies;
  GradientsOfKeys<H>(call, blockIdx.x, reinterpret_cast<KeysScratch<H>*>(block_memory), &copies);
}

template <typename Scratch, typename Call>
cudaError_t Launch(void (*kernel)(Call), const Call& call, int num_rows, cudaStream_t stream) {
  const int64_t num_blocks = call.num_matrices * ((num_rows + kTile - 1) / kTile);
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks >= kNone) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(num_blocks), kAttentionThreads, sizeof(Scratch), stream>>>(call);
  return cudaGetLastError();
}

template <int H>
cudaError_t LaunchGradientsOf(const GradientsCall& call, cudaStream_t stream) {
  const cudaError_t error =
      Launch<QueriesScratch<H>>(QueryGradientsKernel<H>, call, call.num_rows, stream);
  if (error != cudaSuccess) return error;
  return Launch<KeysScratch<H>>(KeyGradientsKernel<H>, call, call.num_keys, stream);
}

template <typename Scratch, typename Call>
cudaError_t Load(void (*kernel)(Call)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(Scratch)));
}

template <int H>
cudaError_t LoadOf() {
  cudaError_t error = Load<AttendScratch<H>>(AttendKernel<H>);
  if (error == cudaSuccess) error = Load<QueriesScratch<H>>(QueryGradientsKernel<H>);
  if (error == cudaSuccess) error = Load<KeysScratch<H>>(KeyGradientsKernel<H>);
  return error;
}

}  // namespace

cudaError_t LaunchAttend(const AttendCall& call, int head_size, cudaStream_t stream) {
  if (head_size == 64) {
    return Launch<AttendScratch<64>>(AttendKernel<64>, call, call.num_rows, stream);
  }
  if (head_size != 128) return cudaErrorInvalidValue;
  return Launch<AttendScratch<128>>(AttendKernel<128>, call, call.num_rows, stream);
}

cudaError_t LaunchGradients(const GradientsCall& call, int head_size, cudaStream_t stream) {
  if (head_size == 64) return LaunchGradientsOf<64>(call, stream);
  return head_size == 128 ? LaunchGradientsOf<128>(call, stream) : cudaErrorInvalidValue;
}

cudaError_t LoadAttentionKernels() {
  const cudaError_t error = LoadOf<64>();
  return error == cudaSuccess ? LoadOf<128>() : error;
}

}  // namespace cpd
