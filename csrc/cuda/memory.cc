// Memory that several GPUs read and write: of this process, and of other processes of the host.
#include "cuda/memory.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <iomanip>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "cuda/kernels.h"

namespace cpd {
namespace {

Status ToStatus(const char* what, cudaError_t error) {
  return CudaStatus(error, "initialize: ", what);
}

}  // namespace

Status MakeIpcSlab(int device, int64_t bytes, char** memory, std::string* handle) {
  const DeviceScope restore;
  Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  void* made = nullptr;
  if (status.ok()) status = ToStatus("allocating symmetric memory", cudaMalloc(&made, bytes));
  *memory = static_cast<char*>(made);
  // Programs may be running: this waits neither for them nor for ranks for which they wait.
  if (status.ok()) status = ClearOnDevice("initialize", *memory, bytes);
  cudaIpcMemHandle_t ipc;
  if (status.ok()) status = ToStatus("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&ipc, made));
  if (!status.ok()) {
    cudaFree(made);
    return status;
  }
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  for (size_t i = 0; i < sizeof ipc; ++i) {
    text << std::setw(2) << int{reinterpret_cast<const uint8_t*>(&ipc)[i]};
  }
  *handle = text.str();
  return status;
}

Status OpenIpcSlab(int device, const std::string& handle, char** memory) {
  cudaIpcMemHandle_t ipc;
  if (handle.size() != 2 * sizeof ipc) {
    return Status::Invalid("initialize: another process sent ", handle.size() / 2,
                           " bytes for a memory handle, it has ", sizeof ipc,
                           ". All processes need the same version of jax_cp_dispatch.");
  }
  for (size_t i = 0; i < sizeof ipc; ++i) {
    const unsigned long byte = std::strtoul(handle.substr(2 * i, 2).c_str(), nullptr, 16);
    reinterpret_cast<uint8_t*>(&ipc)[i] = static_cast<uint8_t>(byte);
  }
  const DeviceScope restore;
  Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  void* opened = nullptr;
  if (status.ok()) {
    status = ToStatus("cudaIpcOpenMemHandle",
                      cudaIpcOpenMemHandle(&opened, ipc, cudaIpcMemLazyEnablePeerAccess));
  }
  *memory = static_cast<char*>(opened);
  return status;
}

Status EndIpcSlab(int device, char* memory, bool is_own) {
  const DeviceScope restore;
  const Status status = ToStatus("selecting the GPU", cudaSetDevice(device));
  if (!status.ok()) return status;
  return is_own ? ToStatus("freeing symmetric memory", cudaFree(memory))
                : ToStatus("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(memory));
}

// ---- Access of GPUs to each other's memory: enabled once for each pair, and tried.

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

// Memory and a stream of a device, which is current while this exists. The default stream would
// wait for others, on which ranks may wait. Both are kept for the next one: programs may be running
// already, and freeing memory waits for the device, where a rank may wait for another.
class Workbench {
 public:
  explicit Workbench(int device) : device_(device) {
    status_ = CudaStatus(cudaSetDevice(device), "selecting a GPU");
    {
      std::lock_guard<std::mutex> lock(Unused().mutex);
      std::vector<Parts>& unused = Unused().by_device[device];
      if (!unused.empty()) {
        parts_ = unused.back();
        unused.pop_back();
      }
    }
    if (parts_.memory == nullptr) {
      Check("allocating memory", [&] { return cudaMalloc(&parts_.memory, kPatternBytes); });
    }
    if (parts_.stream == nullptr) {
      Check("making a stream",
            [&] { return cudaStreamCreateWithFlags(&parts_.stream, cudaStreamNonBlocking); });
    }
  }
  ~Workbench() {
    std::lock_guard<std::mutex> lock(Unused().mutex);
    Unused().by_device[device_].push_back(parts_);
  }
  Workbench(const Workbench&) = delete;
  Workbench& operator=(const Workbench&) = delete;

  template <typename Step>
  void Check(const char* what, Step step) {
    if (status_.ok()) status_ = CudaStatus(step(), what);
  }
  void Transfer(void* to, const void* from) {
    Check("copying a pattern", [&] {
      return cudaMemcpyAsync(to, from, kPatternBytes, cudaMemcpyDefault, parts_.stream);
    });
  }
  void ByKernel(char* to, const char* from) {
    Check("copying a pattern",
          [&] { return LaunchCopy(to, from, kPatternBytes, /*num_blocks=*/1, parts_.stream); });
  }
  void Wait() {
    Check("copying a pattern", [&] { return cudaStreamSynchronize(parts_.stream); });
  }

  char* memory() { return static_cast<char*>(parts_.memory); }
  const Status& status() const { return status_; }

 private:
  struct Parts {
    void* memory = nullptr;
    cudaStream_t stream = nullptr;
  };
  struct Spare {
    std::mutex mutex;
    std::map<int, std::vector<Parts>> by_device;
  };
  static Spare& Unused() {
    static auto* spare = new Spare;  // never destroyed: CUDA may have ended first
    return *spare;
  }

  const DeviceScope restore_;
  const int device_;
  Parts parts_;
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

// ---- Memory of several GPUs of this process, which read and write each other's.

namespace {

// On a separate stream: the default stream waits for others.
template <typename Enqueue>
Status OnOwnStream(const std::string& op, const char* what, Enqueue enqueue) {
  cudaStream_t stream = nullptr;
  Status status = CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), op,
                             ": making a stream");
  if (!status.ok()) return status;
  status = CudaStatus(enqueue(stream), op, what);
  if (status.ok()) status = CudaStatus(cudaStreamSynchronize(stream), op, what);
  cudaStreamDestroy(stream);
  return status;
}

}  // namespace

Status ClearOnDevice(const std::string& op, char* memory, int64_t bytes) {
  return OnOwnStream(op, ": clearing memory", [&](cudaStream_t stream) {
    return cudaMemsetAsync(memory, 0, bytes, stream);
  });
}

Status CopyOnDevice(const std::string& op, void* to, const void* from, int64_t bytes) {
  return OnOwnStream(op, ": copying memory", [&](cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  });
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
