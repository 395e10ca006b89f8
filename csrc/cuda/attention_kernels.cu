// Binds kernels/attend.h and kernels/attention_gradients.h to a GPU's blocks.
#include <algorithm>

#include "cuda/attention_kernels.h"

namespace cpd {
namespace {

using namespace kernels;  // NOLINT: this file is its other half

extern __shared__ __align__(1024) unsigned char block_memory[];

// Blocks of a multiprocessor: as many as the registers of large heads, or memory, allow.
constexpr int BlocksOf(int H, int Hv) { return !kHasWarpgroups ? 1 : H + Hv > 256 ? 2 : 3; }

template <typename Element, int H, int Hv>
__global__ void __launch_bounds__(kAttentionThreads, BlocksOf(H, Hv))
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

template <typename Element, Part kPart, int H, int Hv>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    KeyGradientsKernel(const __grid_constant__ GradientsCall call) {
  AsyncCopies copies;
  GradientsOfKeys<Element, kPart>(call, static_cast<int>(blockIdx.x),
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
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(Scratch)));
}

// The kernels of one type and size of heads.
template <typename Element, int H, int Hv>
struct Kernels {
  static constexpr auto kAttend = AttendKernel<Element, H, Hv>;
  static constexpr auto kQueries = QueryGradientsKernel<Element, H, Hv>;
  static constexpr Part kFirst = H + Hv > 256 ? Part::kK : Part::kBoth;
  static constexpr auto kKeys = KeyGradientsKernel<Element, kFirst, H, Hv>;
  static constexpr size_t kMemory = std::max(
      {sizeof(AttendScratch<H, Hv>), sizeof(QueriesScratch<H, Hv>), sizeof(KeysScratch<H, Hv>)});

  static cudaError_t Launch(const AttendCall& call, cudaStream_t stream) {
    return cpd::Launch<AttendScratch<H, Hv>>(kAttend, call, call.num_heads, call.num_rows, stream);
  }
  static cudaError_t Launch(const GradientsCall& call, cudaStream_t stream) {
    cudaError_t error =
        cpd::Launch<QueriesScratch<H, Hv>>(kQueries, call, call.num_heads, call.num_rows, stream);
    const auto launch_keys = [&](auto kernel) {
      if (error != cudaSuccess) return;
      error =
          cpd::Launch<KeysScratch<H, Hv>>(kernel, call, call.num_kv_heads, call.num_keys, stream);
    };
    launch_keys(kKeys);
    if constexpr (kFirst == Part::kK) launch_keys(KeyGradientsKernel<Element, Part::kV, H, Hv>);
    return error;
  }
  static cudaError_t Load() {
    cudaError_t error = cpd::Load<AttendScratch<H, Hv>>(kAttend);
    if (error == cudaSuccess) error = cpd::Load<QueriesScratch<H, Hv>>(kQueries);
    if (error == cudaSuccess) error = cpd::Load<KeysScratch<H, Hv>>(kKeys);
    if constexpr (kFirst == Part::kK) {
      const auto last = KeyGradientsKernel<Element, Part::kV, H, Hv>;
      if (error == cudaSuccess) error = cpd::Load<KeysScratch<H, Hv>>(last);
    }
    return error;
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
  const auto offer_sizes = [&](auto element, DataType type) {
    using Element = decltype(element);
    offer(Kernels<Element, 64, 64>{}, {type, 64, 64});
    offer(Kernels<Element, 96, 96>{}, {type, 96, 96});
    offer(Kernels<Element, 128, 128>{}, {type, 128, 128});
    offer(Kernels<Element, 192, 128>{}, {type, 192, 128});
    offer(Kernels<Element, 256, 256>{}, {type, 256, 256});
  };
  offer_sizes(BF16{}, DataType::kBF16);
#ifndef CPD_ONLY_BF16
  offer_sizes(F16{}, DataType::kF16);
#endif
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
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return error;
  return ForKernels(nullptr, [&](auto kernels) {
    return kernels.kMemory > static_cast<size_t>(most) ? cudaSuccess : kernels.Load();
  });
}

size_t AttentionMemory(const HeadType& heads) {
  size_t bytes = 0;
  ForKernels(&heads, [&](auto kernels) {
    bytes = kernels.kMemory;
    return cudaSuccess;
  });
  return bytes;
}

}  // namespace cpd
