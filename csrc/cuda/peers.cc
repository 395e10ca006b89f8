// Access of GPUs to each other's memory: enabled once for each pair, and tried.
#include "cuda/peers.h"

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <utility>

#include "cuda/product_kernels.h"
#include "cuda/status.h"

namespace cpd {
namespace {

using Pair = std::pair<int, int>;  // a GPU, and one whose memory it accesses

std::string Named(const Pair& pair) {
  return "GPU " + std::to_string(pair.first) + " and GPU " + std::to_string(pair.second);
}

std::vector<uint64_t> PatternOf(uint64_t seed) {
  std::vector<uint64_t> words(kPatternBytes / sizeof(uint64_t));
  for (uint64_t& word : words) {  // SplitMix64
    seed += 0x9e3779b97f4a7c15;
    word = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
    word ^= word >> 27;
  }
  return words;
}

// Memory and a stream of a device, which is current while it exists. The default stream would wait
// for others, on which ranks may wait.
class Workbench {
 public:
  explicit Workbench(int device) {
    status_ = CudaStatus(cudaSetDevice(device), "selecting a GPU");
    Check("allocating memory", [&] { return cudaMalloc(&memory_, kPatternBytes); });
    Check("making a stream",
          [&] { return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); });
  }
  ~Workbench() {
    if (stream_) cudaStreamDestroy(stream_);
    if (memory_) cudaFree(memory_);
  }

  template <typename Step>
  void Check(const char* what, Step step) {
    if (status_.ok()) status_ = CudaStatus(step(), what);
  }
  void Transfer(void* to, const void* from) {
    Check("copying a pattern",
          [&] { return cudaMemcpyAsync(to, from, kPatternBytes, cudaMemcpyDefault, stream_); });
  }
  void ByKernel(char* to, const char* from) {
    Check("copying a pattern",
          [&] { return LaunchCopy(to, from, kPatternBytes, /*num_blocks=*/1, stream_); });
  }
  void Wait() {
    Check("copying a pattern", [&] { return cudaStreamSynchronize(stream_); });
  }

  char* memory() { return static_cast<char*>(memory_); }
  const Status& status() const { return status_; }

 private:
  const DeviceScope restore_;
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Status status_;
};

// Enables access. `has_enabled`: it was not enabled before.
Status Enable(const Pair& pair, bool* has_enabled) {
  int can = 0;
  Status status =
      CudaStatus(cudaDeviceCanAccessPeer(&can, pair.first, pair.second), "cudaDeviceCanAccessPeer");
  if (!status.ok()) return status;
  if (!can) {
    return Status::Invalid("GPU ", pair.first, " cannot access the memory of GPU ", pair.second,
                           " (cudaDeviceCanAccessPeer)");
  }
  status = CudaStatus(cudaSetDevice(pair.first), "selecting a GPU");
  if (!status.ok()) return status;
  const cudaError_t error = cudaDeviceEnablePeerAccess(pair.second, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return Status::Ok();
  }
  if (error == cudaErrorTooManyPeers) {
    cudaGetLastError();
    return Status::Invalid("GPU ", pair.first,
                           " has as many peers as CUDA allows: 8, unless a switch connects them");
  }
  *has_enabled = error == cudaSuccess;
  return CudaStatus(error, "cudaDeviceEnablePeerAccess");
}

// Writes to the other GPU's memory, and reads it from both.
Status Try(const Pair& pair) {
  Workbench owner(pair.second);
  if (!owner.status().ok()) return owner.status();
  const uint64_t seed = static_cast<uint64_t>(pair.first) << 16 | pair.second;
  bool is_seen = false, is_there = false;
  Status status = WritePattern(pair.first, owner.memory(), seed);
  if (status.ok()) status = HasPattern(pair.first, owner.memory(), seed, &is_seen);
  if (status.ok()) status = HasPattern(pair.second, owner.memory(), seed, &is_there);
  if (!status.ok() || (is_seen && is_there)) return status;
  return Status::Invalid(Named(pair),
                         " access each other's memory, but data is lost (an IOMMU or ACS of the "
                         "machine may be the cause)");
}

}  // namespace

Status ConnectPeers(const std::vector<int>& devices) {
  static std::mutex mutex;
  static auto* connected = new std::set<Pair>;
  std::lock_guard<std::mutex> lock(mutex);
  std::set<Pair> added, enabled;
  Status status;
  const DeviceScope restore;
  for (const int device : devices) {
    for (const int peer : devices) {
      const Pair pair(device, peer);
      if (device == peer || connected->count(pair) || !status.ok()) continue;
      bool has_enabled = false;
      status = Enable(pair, &has_enabled);
      if (has_enabled) enabled.insert(pair);
      added.insert(pair);
    }
  }
  for (const Pair& pair : added) {
    if (status.ok()) status = Try(pair);
  }
  if (status.ok()) {
    connected->insert(added.begin(), added.end());
  } else {
    for (const Pair& pair : enabled) {  // the number of peers is limited
      cudaSetDevice(pair.first);
      cudaDeviceDisablePeerAccess(pair.second);
    }
  }
  return status;
}

Status WritePattern(int device, char* to, uint64_t seed) {
  const std::vector<uint64_t> pattern = PatternOf(seed);
  Workbench bench(device);
  bench.Transfer(bench.memory(), pattern.data());
  bench.ByKernel(to, bench.memory());
  bench.Wait();
  return bench.status();
}

Status HasPattern(int device, const char* at, uint64_t seed, bool* has_it) {
  std::vector<uint64_t> found(kPatternBytes / sizeof(uint64_t));
  Workbench bench(device);
  bench.ByKernel(bench.memory(), at);
  bench.Transfer(found.data(), bench.memory());
  bench.Wait();
  *has_it = bench.status().ok() && found == PatternOf(seed);
  return bench.status();
}

}  // namespace cpd
