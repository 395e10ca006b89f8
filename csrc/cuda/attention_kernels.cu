// Binds kernels/attend.h and kernels/attention_gradients.h to a GPU's blocks.
#include "cuda/attention_kernels.h"

namespace cpd {
namespace {

using namespace kernels;  // NOLINT: this file is its other half

extern __shared__ __align__(1024) unsigned char block_memory[];

template <typename Element, int H, int Hv>
__global__ void __launch_bounds__(kAttentionThreads, kHasWarpgroups ? 3 : 1)
    AttendKernel(const __grid_constant__ AttendCall call) {
  AsyncCopies copies;
  Attend<Element>(call, static_cast<int>(blockIdx.x),
                  reinterpret_cast<AttendScratch<H, Hv>*>(block_memory), &copies);
}

template <typename Element, int H, int Hv>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    QueryGradientsKernel(const __grid_constant__ GradientsCall call) {
  AsyncCopies copies;
  GradientsOfQueries<Element>(call, static_cast<int>(blockIdx.x),
                              reinterpret_cast<QueriesScratch<H, Hv>*>(block_memory), &copies);
}

template <typename Element, int H, int Hv>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    KeyGradientsKernel(const __grid_constant__ GradientsCall call) {
  AsyncCopies copies;
  GradientsOfKeys<Element>(call, static_cast<int>(blockIdx.x),
                           reinterpret_cast<KeysScratch<H, Hv>*>(block_memory), &copies);
}

template <typename Scratch, typename Call>
cudaError_t Launch(void (*kernel)(Call), const Call& call, int64_t num_heads, int num_rows,
                   cudaStream_t stream) {
  const int64_t num_blocks = int64_t{call.batch} * num_heads * ((num_rows + kTile - 1) / kTile);
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks >= kNone) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(num_blocks), kAttentionThreads, sizeof(Scratch), stream>>>(call);
  return cudaGetLastError();
}

template <typename Scratch, typename Call>
cudaError_t Load(void (*kernel)(Call)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(Scratch)));
}

// The kernels of one type and size of heads.
template <typename Element, int H, int Hv>
struct Kernels {
  static cudaError_t Launch(const AttendCall& call, cudaStream_t stream) {
    return cpd::Launch<AttendScratch<H, Hv>>(AttendKernel<Element, H, Hv>, call, call.num_heads,
                                             call.num_rows, stream);
  }
  static cudaError_t Launch(const GradientsCall& call, cudaStream_t stream) {
    const cudaError_t error = cpd::Launch<QueriesScratch<H, Hv>>(
        QueryGradientsKernel<Element, H, Hv>, call, call.num_heads, call.num_rows, stream);
    if (error != cudaSuccess) return error;
    return cpd::Launch<KeysScratch<H, Hv>>(KeyGradientsKernel<Element, H, Hv>, call,
                                           call.num_kv_heads, call.num_keys, stream);
  }
  static cudaError_t Load() {
    cudaError_t error = cpd::Load<AttendScratch<H, Hv>>(AttendKernel<Element, H, Hv>);
    if (error != cudaSuccess) return error;
    error = cpd::Load<QueriesScratch<H, Hv>>(QueryGradientsKernel<Element, H, Hv>);
    if (error != cudaSuccess) return error;
    return cpd::Load<KeysScratch<H, Hv>>(KeyGradientsKernel<Element, H, Hv>);
  }
};

// Calls f(Kernels) for these heads, until it returns an error; or for all, if `heads` is nullptr.
template <typename F>
cudaError_t ForKernels(const HeadType* heads, F f) {
  cudaError_t error = heads ? cudaErrorInvalidValue : cudaSuccess;
  const auto offer = [&](auto kernels, const HeadType& type) {
    if (!heads && error == cudaSuccess) error = f(kernels);
    if (heads && *heads == type) error = f(kernels);
  };
  offer(Kernels<BF16, 64, 64>{}, {DataType::kBF16, 64, 64});
  offer(Kernels<BF16, 128, 128>{}, {DataType::kBF16, 128, 128});
  return error;
}

}  // namespace

cudaError_t LaunchAttend(const AttendCall& call, const HeadType& heads, cudaStream_t stream) {
  return ForKernels(&heads, [&](auto kernels) { return kernels.Launch(call, stream); });
}

cudaError_t LaunchGradients(const GradientsCall& call, const HeadType& heads, cudaStream_t stream) {
  return ForKernels(&heads, [&](auto kernels) { return kernels.Launch(call, stream); });
}

cudaError_t LoadAttentionKernels() {
  return ForKernels(nullptr, [](auto kernels) { return kernels.Load(); });
}

}  // namespace cpd
