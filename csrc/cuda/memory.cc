// Memory of several GPUs of this process, which read and write each other's.
#include "cuda/memory.h"

#include <cuda_runtime_api.h>

#include "cuda/peers.h"
#include "cuda/status.h"

namespace cpd {

// On a separate stream: the default stream waits for others.
Status ClearOnDevice(const std::string& op, char* memory, int64_t bytes) {
  cudaStream_t stream = nullptr;
  Status status = CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), op,
                             ": making a stream");
  if (!status.ok()) return status;
  status = CudaStatus(cudaMemsetAsync(memory, 0, bytes, stream), op, ": clearing memory");
  if (status.ok()) status = CudaStatus(cudaStreamSynchronize(stream), op, ": clearing memory");
  cudaStreamDestroy(stream);
  return status;
}

Status AllocateOnDevices(const std::string& op, const std::vector<DeviceEntry>& devices,
                         int64_t bytes, std::vector<char*>* memory) {
  const DeviceScope restore;
  memory->assign(devices.size(), nullptr);
  std::vector<int> ordinals;
  for (const DeviceEntry& entry : devices) ordinals.push_back(entry.device);
  Status status = ConnectPeers(ordinals);
  if (!status.ok()) {
    status.message = op + ": " + status.message + ". Pass implementation='xla'.";
    return status;
  }
  for (size_t r = 0; r < devices.size() && status.ok(); ++r) {
    char** block = &(*memory)[r];
    status = CudaStatus(cudaSetDevice(devices[r].device), op, ": selecting a GPU");
    if (status.ok()) {
      status =
          CudaStatus(cudaMalloc(reinterpret_cast<void**>(block), bytes), op, ": allocating ", bytes,
                     " bytes (JAX may have taken the memory: XLA_PYTHON_CLIENT_MEM_FRACTION)");
    }
    if (status.ok()) status = ClearOnDevice(op, *block, bytes);
  }
  if (!status.ok()) FreeOnDevices(devices, *memory);
  return status;
}

void FreeOnDevices(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory) {
  const DeviceScope restore;
  for (size_t r = 0; r < memory.size(); ++r) {
    if (memory[r] == nullptr) continue;
    cudaSetDevice(devices[r].device);
    cudaFree(memory[r]);  // waits for work on the device
  }
}

}  // namespace cpd
