// Memory of several GPUs of this process, which read and write each other's.
#include "cuda/memory.h"

#include <cuda_runtime_api.h>

#include "cuda/peers.h"

namespace cpd {
namespace {

Status ToStatus(const std::string& op, const char* what, cudaError_t error) {
  if (error == cudaSuccess) return Status::Ok();
  cudaGetLastError();  // clears it: the next call is not to blame
  return Status::Internal(op, ": ", what, " failed: ", cudaGetErrorString(error));
}

// Restores the calling thread's current device on destruction.
class OnDevice {
 public:
  OnDevice() { cudaGetDevice(&before_); }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

}  // namespace

// On a separate stream: the default stream waits for others.
Status ClearOnDevice(const std::string& op, char* memory, int64_t bytes) {
  cudaStream_t stream = nullptr;
  Status status =
      ToStatus(op, "making a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (!status.ok()) return status;
  status = ToStatus(op, "clearing memory", cudaMemsetAsync(memory, 0, bytes, stream));
  if (status.ok()) status = ToStatus(op, "clearing memory", cudaStreamSynchronize(stream));
  cudaStreamDestroy(stream);
  return status;
}

Status AllocateOnDevices(const std::string& op, const std::vector<DeviceEntry>& devices,
                         int64_t bytes, std::vector<char*>* memory) {
  OnDevice restore;
  memory->assign(devices.size(), nullptr);
  std::vector<int> ordinals;
  for (const DeviceEntry& entry : devices) ordinals.push_back(entry.device);
  Status status = ConnectPeers(ordinals);
  if (!status.ok()) {
    status.message = op + ": " + status.message + ". Pass implementation='xla'.";
    return status;
  }
  const std::string what = "allocating " + std::to_string(bytes) +
                           " bytes (JAX may have taken the memory: "
                           "XLA_PYTHON_CLIENT_MEM_FRACTION)";
  for (size_t r = 0; r < devices.size() && status.ok(); ++r) {
    char** block = &(*memory)[r];
    status = ToStatus(op, "selecting a GPU", cudaSetDevice(devices[r].device));
    if (status.ok()) {
      status = ToStatus(op, what.c_str(), cudaMalloc(reinterpret_cast<void**>(block), bytes));
    }
    if (status.ok()) status = ClearOnDevice(op, *block, bytes);
  }
  if (!status.ok()) FreeOnDevices(devices, *memory);
  return status;
}

void FreeOnDevices(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory) {
  OnDevice restore;
  for (size_t r = 0; r < memory.size(); ++r) {
    if (memory[r] == nullptr) continue;
    cudaSetDevice(devices[r].device);
    cudaFree(memory[r]);  // waits for work on the device
  }
}

}  // namespace cpd
