// Memory at the same offset on several GPUs, which read and write each other's.
#include "cuda/memory.h"

#include <cuda_runtime_api.h>

#include "kernels/call.h"

namespace cpd {
namespace {

Status ToStatus(const std::string& op, const char* what, cudaError_t error) {
  if (error == cudaSuccess) return Status::Ok();
  cudaGetLastError();  // clears it: the next call is not to blame
  return {StatusCode::kInternal, op + ": " + what + " failed: " + cudaGetErrorString(error)};
}

// Restores the calling thread's current device on destruction.
class OnDevice {
 public:
  OnDevice() { cudaGetDevice(&before_); }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// Lets `device` access the memory of `peer`.
Status Connect(const std::string& op, int device, int peer) {
  if (device == peer) return Status::Ok();
  int can = 0;
  Status status =
      ToStatus(op, "asking for peer access", cudaDeviceCanAccessPeer(&can, device, peer));
  if (!status.ok()) return status;
  if (!can) {
    return Status::Invalid(op + ": GPU " + std::to_string(device) +
                           " cannot reach the memory of GPU " + std::to_string(peer) +
                           ". Pass implementation='xla'.");
  }
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return Status::Ok();
  }
  return ToStatus(op, "enabling peer access", error);
}

// Clears memory of the current device, on a separate stream: the default stream waits for others.
Status AllocateZeros(const std::string& op, int64_t bytes, char** memory) {
  const std::string what = "allocating " + std::to_string(bytes) +
                           " bytes (JAX may have taken the memory: "
                           "XLA_PYTHON_CLIENT_MEM_FRACTION)";
  Status status = ToStatus(op, what.c_str(), cudaMalloc(reinterpret_cast<void**>(memory), bytes));
  cudaStream_t stream = nullptr;
  if (status.ok()) {
    status =
        ToStatus(op, "making a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  if (status.ok()) {
    status = ToStatus(op, "clearing memory", cudaMemsetAsync(*memory, 0, bytes, stream));
    if (status.ok()) status = ToStatus(op, "clearing memory", cudaStreamSynchronize(stream));
    cudaStreamDestroy(stream);
  }
  return status;
}

}  // namespace

Status AllocateOnDevices(const std::string& op, const std::vector<DeviceEntry>& devices,
                         int64_t bytes, std::vector<char*>* memory) {
  OnDevice restore;
  memory->assign(devices.size(), nullptr);
  Status status;
  for (size_t r = 0; r < devices.size() && status.ok(); ++r) {
    status = ToStatus(op, "selecting a GPU", cudaSetDevice(devices[r].device));
    for (size_t p = 0; p < devices.size() && status.ok(); ++p) {
      status = Connect(op, devices[r].device, devices[p].device);
    }
    if (status.ok()) status = AllocateZeros(op, bytes, &(*memory)[r]);
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

Slab& Slab::Get() {
  static auto* slab = new Slab;
  return *slab;
}

void Slab::Set(std::vector<char*> bases, int64_t bytes, std::vector<int64_t> memory_groups) {
  std::lock_guard<std::mutex> lock(mutex_);
  bases_ = std::move(bases);
  memory_groups_ = std::move(memory_groups);
  bytes_ = bytes;
  used_ = 0;
  freed_.clear();
}

bool Slab::IsRemote(int64_t process, int64_t other) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto num_processes = static_cast<int64_t>(memory_groups_.size());
  return process < num_processes && other < num_processes &&
         memory_groups_[process] != memory_groups_[other];
}

bool Slab::NeedsNetwork(const std::vector<int64_t>& devices) {
  for (const int64_t entry : devices) {
    if (IsRemote(DeviceEntry::From(devices[0]).process, DeviceEntry::From(entry).process))
      return true;
  }
  return false;
}

Status Slab::Allocate(const std::string& op, const std::vector<DeviceEntry>& devices, int64_t bytes,
                      const std::string& layout, std::vector<char*>* memory, int64_t* generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bases_.empty()) {
    return Status::Invalid(op +
                           ": the processes share no memory yet. Call jax_cp_dispatch.initialize() "
                           "in every process, before the program is compiled.");
  }
  bytes = kernels::AlignUp(bytes);
  int64_t offset = used_;
  *generation = 0;
  if (const auto found = freed_.find(layout); found != freed_.end()) {
    offset = found->second.offset;
    *generation = found->second.generation + 1;
    freed_.erase(found);
  } else if (used_ + bytes > bytes_) {
    return Status::Invalid(op + ": needs " + std::to_string(bytes) +
                           " more bytes of symmetric memory, of " + std::to_string(bytes_) +
                           " bytes " + std::to_string(used_) +
                           " are taken. Start with a larger "
                           "JAX_CP_DISPATCH_SYMMETRIC_BYTES.");
  } else {
    used_ += bytes;
  }
  memory->clear();
  for (const DeviceEntry& entry : devices) {
    if (entry.process < 0 || entry.process >= static_cast<int64_t>(bases_.size())) {
      return Status::Invalid(op + ": process " + std::to_string(entry.process) +
                             " did not take part in jax_cp_dispatch.initialize().");
    }
    memory->push_back(bases_[entry.process] + offset);
  }
  return Status::Ok();
}

void Slab::Free(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory,
                const std::string& layout, int64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (memory.empty()) return;
  freed_.emplace(layout, Freed{memory[0] - bases_[devices[0].process], generation});
}

}  // namespace cpd
