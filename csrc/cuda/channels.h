// The registry of channels: GPU memory through which the ranks of one kind of call exchange data.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/errors.h"
#include "cuda/memory.h"
#include "cuda/slab.h"
#include "gpu_schedule/exchange_pairs.h"
#include "kernels/call.h"
#include "transport/transport.h"

namespace cpd {

// The key of a channel. Calls with the same key share a channel and run in sequence.
struct ChannelKey {
  std::string layout;                  // everything that determines the memory layout
  std::vector<int64_t> buffers;        // ids of registered buffers, per operand group; 0: none
  std::vector<int64_t> devices;        // of the ranks, in order
  const void* communicator = nullptr;  // of a window of NCCL; each rank has its own
  const char* maker = "create_dispatch_buffer";  // creates those buffers, for messages

  bool operator<(const ChannelKey& other) const {
    return std::tie(layout, buffers, devices, communicator) <
           std::tie(other.layout, other.buffers, other.devices, other.communicator);
  }
};

// Makes memory of each rank, with all of them. It stays until the process ends.
using MakeWindow = std::function<Status(const SlabRequest& request, std::vector<char*>* memory)>;

// The sizes of a channel, and where its memory is: in `window` if there is one.
struct ChannelShape {
  int64_t bytes;                       // shared among ranks; bytes of each
  int64_t local_bytes;                 // of each local rank; starts with kernels::State
  int num_local;                       // ranks on one device: one or all
  int num_groups;                      // plans, for messages
  std::chrono::milliseconds deadline;  // for other processes to make it too
  bool in_slab;                        // otherwise on devices of this process
  MakeWindow window = {};
  int rank = -1;  // whose window it is: other ranks of this process have channels of their own
};

// One channel, as one process sees it.
class Channel {
 public:
  // For all local ranks: kernels write here, and the host reads errors.
  struct Local {
    char* state = nullptr;
    kernels::ErrorRecord* errors_on_device = nullptr;
    kernels::ErrorRecord* errors = nullptr;
    int num_ranks = 0;
    cudaEvent_t done = nullptr;  // the last call
    std::mutex mutex;            // held while a call is enqueued
    std::string op;              // of the last call; under the mutex
    uint64_t* seen = nullptr;    // host memory for the number of a call, and who has come to it
    cudaStream_t watch = nullptr;
  };

  // A rank of this process in a call to which others have not come.
  struct Waiting {
    int64_t channel;  // unique in this process
    std::string op;
    int rank;
    uint64_t call;  // its number on the channel
    std::vector<int> missing;
    std::vector<int64_t> processes;  // of the missing ranks
  };

  const std::vector<char*>& memory() const { return memory_; }  // by rank
  const Local& local(int first_rank) const { return locals_.at(first_rank); }

  // Enqueues a call after the previous one on this device, if XLA runs them on different streams.
  cudaError_t Enqueue(const std::string& op, int first_rank, cudaStream_t stream,
                      const std::function<void()>& launch) {
    Local& local = locals_.at(first_rank);
    std::lock_guard<std::mutex> lock(local.mutex);
    local.op = op;
    const cudaError_t waited = cudaStreamWaitEvent(stream, local.done, 0);
    launch();
    const cudaError_t recorded = cudaEventRecord(local.done, stream);
    return waited != cudaSuccess ? waited : recorded;
  }

  // The first error that a device found since the last call; empty if there is none.
  std::string TakeError(const std::string& op) {
    std::string first;
    for (auto& [rank, local] : locals_) {
      for (int r = 0; r < local.num_ranks; ++r) {
        kernels::ErrorRecord* record = local.errors + r;
        const uint64_t raised = __atomic_load_n(&record->raised, __ATOMIC_ACQUIRE);
        if (raised == record->reported) continue;
        const std::string text =
            Describe(op, *record, static_cast<int>(devices_.size()), num_groups_);
        // The rank that rejected the call names the cause; the others only name that rank.
        const bool is_cause = record->failure != kernels::Failure::kPeer;
        __atomic_store_n(&record->reported, raised, __ATOMIC_RELEASE);
        if (first.empty() || is_cause) first = text;
      }
    }
    return first;
  }

  // Adds the ranks that wait for others now. Reads the words in which ranks say on the device that
  // they have come: an exchange's and a GEMM's are the first of its memory. A device that cannot be
  // read within a second is left out. Not at the same time as itself or Free.
  void AddWaiting(std::vector<Waiting>* all) {
    const auto num_ranks = static_cast<int>(devices_.size());
    for (auto& [rank, local] : locals_) {
      if (local.num_ranks > 1) continue;  // all ranks are here
      const DeviceScope scope(devices_[rank].device);
      if (!IsBusy(cudaEventQuery(local.done)) || IsBusy(cudaStreamQuery(local.watch))) continue;
      cudaMemcpyAsync(local.seen, local.state + offsetof(kernels::State, epoch), sizeof(uint64_t),
                      cudaMemcpyDeviceToHost, local.watch);
      cudaMemcpyAsync(local.seen + 1, memory_[rank], num_ranks * sizeof(uint64_t),
                      cudaMemcpyDeviceToHost, local.watch);
      constexpr int kMostMilliseconds = 1000;
      for (int i = 0; i < kMostMilliseconds && IsBusy(cudaStreamQuery(local.watch)); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (IsBusy(cudaStreamQuery(local.watch))) continue;
      Waiting waiting{id_,
                      "a call",
                      rank,
                      local.seen[0],
                      MissingRanks(local.seen + 1, num_ranks, local.seen[0]),
                      {}};
      if (waiting.missing.empty()) continue;
      for (const int missing : waiting.missing) {
        waiting.processes.push_back(devices_[missing].process);
      }
      if (std::unique_lock<std::mutex> lock(local.mutex, std::try_to_lock); lock.owns_lock()) {
        waiting.op = local.op;
      }
      all->push_back(std::move(waiting));
    }
  }

 private:
  friend class ChannelRegistry;

  static bool IsBusy(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaErrorNotReady;
  }

  // Processes make a channel at the first call of a program, which they may have compiled, or begun
  // to compile, at different times.
  static constexpr int kFirstCallDeadlines = 3;

  // Of each local rank: its error record, and what `AddWaiting` has read.
  static constexpr size_t kBytesOnHost =
      sizeof(kernels::ErrorRecord) + (1 + kernels::kMaxRanks) * sizeof(uint64_t);

  // The stream by which all channels of the current device are read.
  static cudaError_t FindWatch(cudaStream_t* stream) {
    static auto& by_device = *new std::map<int, cudaStream_t>;
    static std::mutex mutex;  // ranks make channels in windows at the same time
    std::lock_guard<std::mutex> lock(mutex);
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    cudaStream_t& found = by_device[device];
    if (error == cudaSuccess && found == nullptr) {
      error = cudaStreamCreateWithFlags(&found, cudaStreamNonBlocking);
    }
    *stream = found;
    return error;
  }

  // The state and error records of `num_ranks` ranks on the current device.
  static Status MakeLocal(const std::string& op, int num_ranks, int64_t bytes_per_rank,
                          Local* local) {
    const int64_t bytes = num_ranks * bytes_per_rank;
    cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&local->state), bytes);
    if (error == cudaSuccess) {
      const Status status = ClearOnDevice(op, local->state, bytes);
      if (!status.ok()) return status;
      error = cudaHostAlloc(reinterpret_cast<void**>(&local->errors), num_ranks * kBytesOnHost,
                            cudaHostAllocMapped | cudaHostAllocPortable);
    }
    if (error == cudaSuccess) {
      std::memset(static_cast<void*>(local->errors), 0, num_ranks * kBytesOnHost);
      local->seen = reinterpret_cast<uint64_t*>(local->errors + num_ranks);
      error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&local->errors_on_device),
                                       local->errors, 0);
    }
    if (error == cudaSuccess)
      error = cudaEventCreateWithFlags(&local->done, cudaEventDisableTiming);
    if (error == cudaSuccess) error = FindWatch(&local->watch);
    local->num_ranks = num_ranks;
    return CudaStatus(error, op, ": allocating a channel's state");
  }

  Status Make(const std::string& op, const ChannelKey& key, const ChannelShape& shape,
              int64_t process) {
    bytes_ = shape.bytes;
    in_slab_ = shape.in_slab;
    in_window_ = shape.window != nullptr;
    num_groups_ = shape.num_groups;
    for (const int64_t entry : key.devices) devices_.push_back(DeviceEntry::From(entry));
    request_ = {op, key.layout, {}, bytes_, kFirstCallDeadlines * shape.deadline};
    for (const DeviceEntry& entry : devices_) request_.processes.push_back(entry.process);
    Status status;
    // First what is local: a rank that has no memory for it fails before others wait for it.
    for (size_t r = 0; r < devices_.size() && status.ok(); r += shape.num_local) {
      const auto rank = static_cast<int>(r);
      if (devices_[r].process != process || (in_window_ && rank != shape.rank)) continue;
      const DeviceScope scope(devices_[r].device);
      status = MakeLocal(op, shape.num_local, shape.local_bytes, &locals_[rank]);
    }
    if (status.ok()) {
      status = in_window_ ? shape.window(request_, &memory_)
               : in_slab_ ? Allocate(op, process)
                          : AllocateOnDevices(op, devices_, bytes_, &memory_);
    }
    if (!status.ok()) Free();
    return status;
  }

  void Free() {
    for (auto& [rank, local] : locals_) {
      const DeviceScope scope(devices_[rank].device);
      cudaFree(local.state);  // waits for work on the device
      cudaFreeHost(local.errors);
      if (local.done) cudaEventDestroy(local.done);
    }
    locals_.clear();
    if (in_slab_) {
      Slab::Get().Free(request_, memory_);
    } else if (!in_window_) {
      FreeOnDevices(devices_, memory_);
    }
    memory_.clear();
  }

  Status Allocate(const std::string& op, int64_t process) {
    const auto clear = [&](char* memory, int64_t bytes) {
      const DeviceScope restore;
      for (const DeviceEntry& entry : devices_) {
        if (entry.process == process) cudaSetDevice(entry.device);
      }
      return ClearOnDevice(op, memory, bytes);
    };
    Status status = Slab::Get().Allocate(request_, clear, &memory_);
    if (!status.ok()) status.message = op + ": " + status.message;
    return status;
  }

  SlabRequest request_;  // where it is in slabs
  std::vector<DeviceEntry> devices_;
  std::vector<char*> memory_;
  std::map<int, Local> locals_;  // by the first rank of a device of this process
  int64_t bytes_ = 0;
  int64_t id_ = 0;  // of channels of this process
  int num_groups_ = 1;
  bool in_slab_ = false, in_window_ = false;
};

class ChannelRegistry {
 public:
  static ChannelRegistry& Get() {
    static auto* registry = new ChannelRegistry;  // never destroyed: CUDA may have ended first
    return *registry;
  }

  // The channel of a call. The first device that asks creates it for all devices of this process.
  Status Find(const std::string& op, const ChannelKey& key, const ChannelShape& shape,
              std::shared_ptr<Channel>* channel) {
    const auto look = [&] {
      std::lock_guard<std::mutex> lock(mutex_);
      return Look(op, key, channel);
    };
    Status status = look();
    if (!status.ok() || *channel) return status;
    std::unique_lock<std::mutex> making(making_, std::defer_lock);
    if (!shape.window) making.lock();  // a window meets ranks that may be devices of this process
    status = look();                   // another device's call may have created it
    if (!status.ok() || *channel) return status;
    auto made = std::make_shared<Channel>();
    status = made->Make(op, key, shape, process_);
    if (!status.ok()) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    made->id_ = ++num_made_;
    *channel = channels_[key] = std::move(made);
    return status;
  }

  // Frees the channels of a registered buffer once work on their devices is over. Later calls that
  // name it fail.
  void Release(int64_t buffer) {
    std::lock_guard<std::mutex> making(making_);
    std::vector<std::shared_ptr<Channel>> unused;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      released_.insert(buffer);
      for (auto at = channels_.begin(); at != channels_.end();) {
        bool is_used = false;
        for (const int64_t id : at->first.buffers) is_used = is_used || id == buffer;
        if (is_used) unused.push_back(at->second);
        at = is_used ? channels_.erase(at) : std::next(at);
      }
    }
    std::lock_guard<std::mutex> watching(watching_);
    for (const auto& channel : unused) channel->Free();
  }

  // Allows an id again whose buffer has been created again.
  void Restore(int64_t buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    released_.erase(buffer);
  }

  // Errors that no call has reported yet.
  std::vector<std::string> TakeErrors() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> errors;
    for (auto& [key, channel] : channels_) {
      std::string error = channel->TakeError("jax_cp_dispatch");
      if (!error.empty()) errors.push_back(std::move(error));
    }
    return errors;
  }

  // The ranks of this process that wait for others now.
  std::vector<Channel::Waiting> FindWaiting() {
    std::vector<Channel::Waiting> found;
    std::vector<std::shared_ptr<Channel>> all;
    std::lock_guard<std::mutex> watching(watching_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [key, channel] : channels_) all.push_back(channel);
    }
    for (const auto& channel : all) channel->AddWaiting(&found);
    return found;
  }

  // How JAX counts the processes, and the devices of this one: `ordinals` are CUDA's numbers.
  void SetProcess(int64_t process, std::vector<int64_t> ordinals) {
    std::lock_guard<std::mutex> lock(mutex_);
    process_ = process;
    ordinals_ = std::move(ordinals);
  }

  // A device of this process as the device table names it; and the other way round, where devices
  // of other processes stay as they are.
  int64_t NameOf(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find(ordinals_.begin(), ordinals_.end(), ordinal);
    const int64_t number = found == ordinals_.end() ? ordinal : found - ordinals_.begin();
    return process_ << 16 | number;
  }

  int64_t ToOrdinal(int64_t entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [process, number] = DeviceEntry::From(entry);
    if (process != process_ || number >= static_cast<int>(ordinals_.size())) return entry;
    return process << 16 | ordinals_[number];
  }

 private:
  // Sets `channel` if it exists. Called with `mutex_` held.
  Status Look(const std::string& op, const ChannelKey& key, std::shared_ptr<Channel>* channel) {
    for (const int64_t buffer : key.buffers) {
      if (released_.count(buffer) == 0) continue;
      return Status::Invalid(op, ": buffer ", buffer, " has been destroyed. Create another with ",
                             key.maker, ", and recompile the programs that use it.");
    }
    if (const auto found = channels_.find(key); found != channels_.end()) {
      *channel = found->second;
    }
    return Status::Ok();
  }

  // Serializes the creation of channels. Allocating and freeing may wait for a device on which a
  // rank waits for another's call; with a separate mutex this does not block calls whose channel
  // exists.
  std::mutex making_, mutex_;
  std::mutex watching_;  // held while channels are read, and while they are freed
  std::map<ChannelKey, std::shared_ptr<Channel>> channels_;
  std::set<int64_t> released_;
  int64_t num_made_ = 0;  // under `mutex_`
  int64_t process_ = 0;
  std::vector<int64_t> ordinals_;
};

// ---- A device's stream for exchanges that run beside the program, and the pairs of calls around
// them.

class CudaOrder final : public StreamOrder {
 public:
  void* MakeEvent() override {
    cudaEvent_t event = nullptr;
    return IsFine(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) ? event : nullptr;
  }
  bool Record(void* event, void* stream) override {
    return IsFine(
        cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
  }
  bool Wait(void* stream, void* event) override {
    return IsFine(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
  }
  bool IsOver(void* event) override {
    return IsFine(cudaEventQuery(static_cast<cudaEvent_t>(event)));
  }

 private:
  static bool IsFine(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess;
  }
};

// One per device: its exchanges run one after another, in the same order on all ranks.
struct ExchangeStream {
  explicit ExchangeStream(StreamOrder* order) : pairs(order) {}

  // That of `device`, which must be current. Made on first use, and kept: call it first before a
  // program runs.
  static Status Find(const std::string& op, int device, ExchangeStream** found) {
    Streams& all = All();
    std::lock_guard<std::mutex> lock(all.mutex);
    std::unique_ptr<ExchangeStream>& one = all.by_device[device];
    if (one == nullptr) {
      auto made = std::make_unique<ExchangeStream>(&all.order);
      int lowest = 0, highest = 0;
      cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
      if (error == cudaSuccess) {
        error = cudaStreamCreateWithPriority(&made->stream, cudaStreamNonBlocking, highest);
      }
      if (error != cudaSuccess) return CudaStatus(error, op, ": making a stream");
      one = std::move(made);
    }
    *found = one.get();
    return Status::Ok();
  }

  // In the initialize stage of every call: see ExchangePairs::AwaitEnded.
  static Status AwaitEnded(const std::string& op, int device, cudaStream_t stream) {
    Streams& all = All();
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.by_device.find(device);
    if (found == all.by_device.end() || found->second == nullptr ||
        found->second->pairs.AwaitEnded(stream)) {
      return Status::Ok();
    }
    return Status::Internal(op, ": waiting for an exchange of an earlier program failed.");
  }

  // The exchanges of all devices that went on after their first call.
  static int64_t NumStarted() {
    Streams& all = All();
    std::lock_guard<std::mutex> lock(all.mutex);
    int64_t num = 0;
    for (auto& [device, one] : all.by_device) {
      if (one != nullptr) num += one->pairs.num_started();
    }
    return num;
  }

  cudaStream_t stream = nullptr;
  ExchangePairs pairs;

 private:
  struct Streams {
    std::mutex mutex;
    CudaOrder order;
    std::map<int, std::unique_ptr<ExchangeStream>> by_device;
  };
  static Streams& All() {
    static auto* all = new Streams;  // never destroyed: CUDA may have ended first
    return *all;
  }
};

}  // namespace cpd
