// Memory that several GPUs read and write: of this process, and of other processes of the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// ---- Errors of CUDA as statuses, and the current device of a thread.

// The message is the text of these values, that it failed, and why.
template <typename... What>
Status CudaStatus(cudaError_t error, const What&... what) {
  if (error == cudaSuccess) return Status::Ok();
  cudaGetLastError();  // clears it: the next call is not to blame
  return Status::Internal(what..., " failed: ", cudaGetErrorString(error));
}

// Makes the thread's device of before current again on destruction.
class DeviceScope {
 public:
  DeviceScope() { cudaGetDevice(&before_); }
  explicit DeviceScope(int device) : DeviceScope() { cudaSetDevice(device); }
  ~DeviceScope() { cudaSetDevice(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

// ---- Slabs of memory that other processes of the same host map through CUDA IPC. The current
// device stays.

// The handle is one word of text.
Status MakeIpcSlab(int device, int64_t bytes, char** memory, std::string* handle);
Status OpenIpcSlab(int device, const std::string& handle, char** memory);
// Undoes these: other processes close a slab before its own process frees it.
Status EndIpcSlab(int device, char* memory, bool is_own);

// ---- Access of GPUs to each other's memory: enabled once for each pair, and tried.

// Lets GPUs of this process access each other's memory. Every pair is tried once, in both
// directions: some machines lose what is written. The message of a failure has no operation.
Status ConnectPeers(const std::vector<int>& devices);

// A pattern that a kernel of `device` writes, or finds, in memory that may belong to another GPU.
constexpr int64_t kPatternBytes = 1024;
Status WritePattern(int device, char* to, uint64_t seed);
Status HasPattern(int device, const char* at, uint64_t seed, bool* has_it);

// ---- Memory of several GPUs of this process, which read and write each other's.

// A GPU: the number of its process, and in this process CUDA's number of the GPU.
struct DeviceEntry {
  int64_t process;
  int device;

  static DeviceEntry From(int64_t packed) {
    return {packed >> 16, static_cast<int>(packed & 0xffff)};
  }
};

// Memory on GPUs of this process. For N ranks on one GPU, N blocks there. After an error, what
// `memory` has is to be freed.
Status AllocateOnDevices(const std::string& op, const std::vector<DeviceEntry>& devices,
                         int64_t bytes, std::vector<char*>* memory);
// Clear and copy memory of the current device, and wait.
Status ClearOnDevice(const std::string& op, char* memory, int64_t bytes);
Status CopyOnDevice(const std::string& op, void* to, const void* from, int64_t bytes);
void FreeOnDevices(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory);

}  // namespace cpd
