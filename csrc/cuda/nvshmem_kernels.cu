// Dispatch and combine over NVSHMEM, for memory that cannot be mapped; NVSHMEM's device functions
// are the fabric. Compiled separately from _cuda, and device-linked into _nvshmem.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/call_kernels.h"
#include "cuda/kernels.h"

namespace cpd {
namespace {

// Ranks are processing elements. Quiet waits for all operations of this process's GPU, in all
// blocks, including those of earlier kernels.
struct Nvshmem {
  static constexpr bool kHasNetwork = true;

  static __device__ void Put(const Block&, char* to, const char* from, int64_t bytes, int pe) {
    if (bytes > 0) nvshmemx_putmem_nbi_block(to, from, bytes, pe);
  }
  static __device__ void Get(const Block&, char* to, const char* from, int64_t bytes, int pe) {
    if (bytes > 0) nvshmemx_getmem_nbi_block(to, from, bytes, pe);
  }
  static __device__ void Quiet() { nvshmem_quiet(); }
  static __device__ void PutSignal(void* to, const void* from, int64_t bytes, uint64_t* signal,
                                   uint64_t value, int pe) {
    nvshmem_putmem_signal_nbi(to, from, bytes, signal, value, NVSHMEM_SIGNAL_SET, pe);
  }
  static __device__ void SetSignal(uint64_t* signal, uint64_t value, int pe) {
    nvshmemx_signal_op(signal, value, NVSHMEM_SIGNAL_SET, pe);
  }
  // Otherwise data from the network may become visible later than the signal.
  static __device__ void Observe(uint64_t* signal, uint64_t value) {
    nvshmem_uint64_test(signal, NVSHMEM_CMP_GE, value);
  }
};

int device_here = 0;

}  // namespace

cudaError_t LoadNvshmemKernels(int device) {
  device_here = device;
  const cudaError_t error = cudaSetDevice(device);
  return error == cudaSuccess ? LoadKernelsOver<Nvshmem>() : error;
}

// The caller has made the device current in its own copy of CUDA's runtime; this module has another
// copy.
cudaError_t LaunchNvshmemCall(const Call& call, int num_blocks, cudaStream_t stream) {
  const cudaError_t error = cudaSetDevice(device_here);
  return error == cudaSuccess ? LaunchOver<Nvshmem>(call, num_blocks, stream) : error;
}

}  // namespace cpd
