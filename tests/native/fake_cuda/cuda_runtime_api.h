// A CUDA runtime in memory of the host, for csrc/cuda and csrc/ffi/cuda without a GPU: streams run
// what is enqueued at once, and all devices reach all memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>

enum cudaError_t {
  cudaSuccess,
  cudaErrorNotReady,
  cudaErrorMemoryAllocation,
  cudaErrorPeerAccessAlreadyEnabled,
  cudaErrorTooManyPeers
};
enum cudaMemcpyKind { cudaMemcpyDeviceToHost, cudaMemcpyDefault };
enum : unsigned {
  cudaHostAllocMapped,
  cudaHostAllocPortable,
  cudaStreamNonBlocking,
  cudaEventDisableTiming,
  cudaIpcMemLazyEnablePeerAccess
};
using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;
struct cudaIpcMemHandle_t {
  void* memory;
};

inline const char* cudaGetErrorString(cudaError_t) { return "as asked"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline thread_local int fake_device = 0;
inline cudaError_t cudaGetDevice(int* device) { return *device = fake_device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return fake_device = device, cudaSuccess; }
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  return *lowest = *highest = 0, cudaSuccess;
}

inline std::atomic<int> fake_allocations_left{1 << 30};  // before memory is full
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (fake_allocations_left-- <= 0) return cudaErrorMemoryAllocation;
  return *memory = std::aligned_alloc(256, (bytes + 255) & ~size_t{255}), cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaHostGetDevicePointer(void** there, void* here, unsigned) {
  return *there = here, cudaSuccess;
}
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return handle->memory = memory, cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  return *memory = handle.memory, cudaSuccess;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }

template <typename Fake>
cudaError_t MakeFake(Fake** made) {
  static char any;
  return *made = reinterpret_cast<Fake*>(&any), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned) {
  return MakeFake(made);
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int) {
  return MakeFake(made);
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) { return MakeFake(made); }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return std::memset(to, value, bytes), cudaSuccess;
}
