// CUDA's part of exchanges through windows of NCCL.
#include "ffi/cuda/nccl_window.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "ffi/cuda/handlers.h"

namespace cpd {
namespace {

struct CudaDevice {
  static Status Use(const std::string& op, int device, int64_t* entry, int* num_resident) {
    static std::atomic<int> known[64];
    cudaError_t error = cudaSetDevice(device);
    *entry = ChannelRegistry::Get().NameOf(device);
    *num_resident = known[device & 63];
    if (error == cudaSuccess && *num_resident == 0) {
      error = NumResidentBlocks(num_resident);
      if (error == cudaSuccess) known[device & 63] = *num_resident;
    }
    return CudaStatus(error, op, ": loading kernels on GPU ", device);
  }

  static Status MakeLocal(const std::string& op, int64_t bytes, window::Local* local) {
    constexpr unsigned kMapped = cudaHostAllocMapped | cudaHostAllocPortable;
    auto** errors = reinterpret_cast<void**>(&local->errors);
    cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&local->state), bytes);
    if (error == cudaSuccess) {
      const Status status = ClearOnDevice(op, local->state, bytes);
      if (!status.ok()) return status;
      error = cudaHostAlloc(errors, sizeof(kernels::ErrorRecord), kMapped);
    }
    if (error == cudaSuccess) {
      *local->errors = {};
      auto** on_device = reinterpret_cast<void**>(&local->errors_on_device);
      error = cudaHostGetDevicePointer(on_device, *errors, 0);
    }
    cudaEvent_t done = nullptr;
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
    local->done = done;
    return CudaStatus(error, op, ": allocating a channel's state");
  }

  static Status Fill(const std::string& op, char* memory, int64_t bytes,
                     const uint64_t (&words)[2]) {
    const Status status = ClearOnDevice(op, memory, bytes);
    return status.ok() ? Copy(op, memory, words) : status;
  }

  static Status Read(const std::string& op, const char* from, uint64_t (&words)[2]) {
    return Copy(op, words, from);
  }

  static Status Launch(const std::string& op, const kernels::Call& call, int num_blocks,
                       void* stream, window::Local* local, bool* is_over) {
    const auto on = static_cast<cudaStream_t>(stream);
    const auto done = static_cast<cudaEvent_t>(local->done);
    const cudaError_t waited = cudaStreamWaitEvent(on, done, 0);
    cudaError_t error = LaunchCall(call, num_blocks, on);
    const cudaError_t recorded = cudaEventRecord(done, on);
    if (error == cudaSuccess) error = waited == cudaSuccess ? recorded : waited;
    *is_over = ChecksEachCall();
    if (error == cudaSuccess && *is_over) error = cudaStreamSynchronize(on);
    return CudaStatus(error, op, ": the call");
  }

 private:
  // Two words, on a separate stream: the default stream waits for others.
  static Status Copy(const std::string& op, void* to, const void* from) {
    cudaStream_t stream = nullptr;
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(to, from, 2 * sizeof(uint64_t), cudaMemcpyDefault, stream);
      if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
    return CudaStatus(error, op, ": a channel's first words");
  }
};

}  // namespace

std::vector<Target> NcclWindowTargets() { return window::Targets<CudaDevice>(); }

}  // namespace cpd
