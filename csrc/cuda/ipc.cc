// Slabs of memory that other processes of the same host map through CUDA IPC handles.
#include "cuda/ipc.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/status.h"

namespace cpd {
namespace {

Status ToStatus(const char* what, cudaError_t error) {
  return CudaStatus(error, "initialize: ", what);
}

}  // namespace

Status MakeIpcSlab(int device, int64_t bytes, uint64_t* address, std::string* handle) {
  Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  void* memory = nullptr;
  if (status.ok()) status = ToStatus("allocating symmetric memory", cudaMalloc(&memory, bytes));
  if (status.ok()) status = ToStatus("clearing symmetric memory", cudaMemset(memory, 0, bytes));
  if (status.ok()) status = ToStatus("clearing symmetric memory", cudaDeviceSynchronize());
  cudaIpcMemHandle_t ipc;
  if (status.ok()) status = ToStatus("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&ipc, memory));
  if (!status.ok()) return status;
  handle->assign(reinterpret_cast<const char*>(&ipc), sizeof ipc);
  *address = reinterpret_cast<uint64_t>(memory);
  return status;
}

Status OpenIpcSlab(int device, const std::string& handle, uint64_t* address) {
  cudaIpcMemHandle_t ipc;
  if (handle.size() != sizeof ipc) {
    return Status::Invalid("initialize: another process sent ", handle.size(),
                           " bytes for a memory handle, it has ", sizeof ipc,
                           ". All processes need the same version of jax_cp_dispatch.");
  }
  std::memcpy(&ipc, handle.data(), sizeof ipc);
  Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  void* memory = nullptr;
  if (status.ok()) {
    status = ToStatus("cudaIpcOpenMemHandle",
                      cudaIpcOpenMemHandle(&memory, ipc, cudaIpcMemLazyEnablePeerAccess));
  }
  *address = reinterpret_cast<uint64_t>(memory);
  return status;
}

Status CloseIpcSlab(int device, uint64_t address) {
  Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  if (!status.ok()) return status;
  return ToStatus("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(reinterpret_cast<void*>(address)));
}

Status FreeIpcSlab(int device, uint64_t address) {
  Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  if (!status.ok()) return status;
  return ToStatus("freeing symmetric memory", cudaFree(reinterpret_cast<void*>(address)));
}

}  // namespace cpd
