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

Status AllocateOnDevices(const std::string& op, const std::vector<Place>& places, int64_t bytes,
                         std::vector<char*>* memory) {
  OnDevice restore;
  memory->assign(places.size(), nullptr);
  Status status;
  for (size_t r = 0; r < places.size() && status.ok(); ++r) {
    status = ToStatus(op, "selecting a GPU", cudaSetDevice(places[r].device));
    for (size_t p = 0; p < places.size() && status.ok(); ++p) {
      status = Connect(op, places[r].device, places[p].device);
    }
    if (status.ok()) status = AllocateZeros(op, bytes, &(*memory)[r]);
  }
  if (!status.ok()) FreeOnDevices(places, *memory);
  return status;
}

void FreeOnDevices(const std::vector<Place>& places, const std::vector<char*>& memory) {
  OnDevice restore;
  for (size_t r = 0; r < memory.size(); ++r) {
    if (memory[r] == nullptr) continue;
    cudaSetDevice(places[r].device);
    cudaFree(memory[r]);  // waits for work on the device
  }
}

Slab& Slab::Get() {
  static auto* slab = new Slab;
  return *slab;
}

void Slab::Set(std::vector<char*> bases, int64_t bytes, std::vector<int64_t> islands) {
  std::lock_guard<std::mutex> lock(mutex_);
  bases_ = std::move(bases);
  islands_ = std::move(islands);
  bytes_ = bytes;
  used_ = 0;
  freed_.clear();
}

bool Slab::IsRemote(int64_t process, int64_t other) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto num_processes = static_cast<int64_t>(islands_.size());
  return process < num_processes && other < num_processes && islands_[process] != islands_[other];
}

bool Slab::NeedsNetwork(const std::vector<int64_t>& places) {
  for (const int64_t place : places) {
    if (IsRemote(Place::From(places[0]).process, Place::From(place).process)) return true;
  }
  return false;
}

Status Slab::Allocate(const std::string& op, const std::vector<Place>& places, int64_t bytes,
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
  for (const Place& place : places) {
    if (place.process < 0 || place.process >= static_cast<int64_t>(bases_.size())) {
      return Status::Invalid(op + ": process " + std::to_string(place.process) +
                             " did not take part in jax_cp_dispatch.initialize().");
    }
    memory->push_back(bases_[place.process] + offset);
  }
  return Status::Ok();
}

void Slab::Free(const std::vector<Place>& places, const std::vector<char*>& memory,
                const std::string& layout, int64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (memory.empty()) return;
  freed_.emplace(layout, Freed{memory[0] - bases_[places[0].process], generation});
}

}  // namespace cpd
