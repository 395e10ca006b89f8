// Errors of CUDA as statuses, and the current device of a thread.
#pragma once

#include <cuda_runtime_api.h>

#include "transport/transport.h"

namespace cpd {

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

}  // namespace cpd
