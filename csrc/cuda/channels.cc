// The registry of channels: GPU memory through which the ranks of one kind of call exchange data.
#include "cuda/channels.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "cuda/errors.h"
#include "cuda/status.h"

namespace cpd {
namespace {

// Processes make a channel at the first call of a program, which they may have compiled, or begun
// to compile, at different times.
constexpr int kFirstCallDeadlines = 3;

// The state and error records of `num_ranks` ranks on the current device.
Status MakeLocal(const std::string& op, int num_ranks, int64_t bytes_per_rank,
                 Channel::Local* local) {
  const int64_t bytes = num_ranks * bytes_per_rank;
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&local->state), bytes);
  if (error == cudaSuccess) {
    const Status status = ClearOnDevice(op, local->state, bytes);
    if (!status.ok()) return status;
    error = cudaHostAlloc(reinterpret_cast<void**>(&local->errors),
                          num_ranks * sizeof(kernels::ErrorRecord),
                          cudaHostAllocMapped | cudaHostAllocPortable);
  }
  if (error == cudaSuccess) {
    std::memset(static_cast<void*>(local->errors), 0, num_ranks * sizeof(kernels::ErrorRecord));
    error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&local->errors_on_device),
                                     local->errors, 0);
  }
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&local->done, cudaEventDisableTiming);
  local->num_ranks = num_ranks;
  return CudaStatus(error, op, ": allocating a channel's state");
}

}  // namespace

bool ChannelKey::operator<(const ChannelKey& other) const {
  return std::tie(layout, buffers, devices) < std::tie(other.layout, other.buffers, other.devices);
}

Status Channel::Make(const std::string& op, const ChannelKey& key, const ChannelShape& shape,
                     bool in_slab, int64_t process) {
  bytes_ = shape.bytes;
  in_slab_ = in_slab;
  num_groups_ = shape.num_groups;
  for (const int64_t entry : key.devices) devices_.push_back(DeviceEntry::From(entry));
  request_ = {op, key.layout, {}, bytes_, kFirstCallDeadlines * shape.deadline};
  for (const DeviceEntry& entry : devices_) request_.processes.push_back(entry.process);
  Status status =
      in_slab ? Allocate(op, process) : AllocateOnDevices(op, devices_, bytes_, &memory_);
  const DeviceScope restore;
  if (shape.num_local > 1) {
    cudaSetDevice(devices_[0].device);
    if (status.ok()) {
      status = MakeLocal(op, shape.num_local, shape.local_bytes, &locals_[0]);
    }
  } else {
    for (size_t r = 0; r < devices_.size() && status.ok(); ++r) {
      if (devices_[r].process != process) continue;
      cudaSetDevice(devices_[r].device);
      status = MakeLocal(op, 1, shape.local_bytes, &locals_[static_cast<int>(r)]);
    }
  }
  if (!status.ok()) Free();
  return status;
}

Status Channel::Allocate(const std::string& op, int64_t process) {
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

void Channel::Free() {
  for (auto& [rank, local] : locals_) {
    const DeviceScope scope(devices_[rank].device);
    cudaFree(local.state);  // waits for work on the device
    cudaFreeHost(local.errors);
    if (local.done) cudaEventDestroy(local.done);
  }
  locals_.clear();
  if (in_slab_) {
    Slab::Get().Free(request_, memory_);
  } else {
    FreeOnDevices(devices_, memory_);
  }
  memory_.clear();
}

cudaError_t Channel::Enqueue(int first_rank, cudaStream_t stream,
                             const std::function<void()>& launch) {
  Local& local = locals_.at(first_rank);
  std::lock_guard<std::mutex> lock(local.mutex);
  const cudaError_t waited = cudaStreamWaitEvent(stream, local.done, 0);
  launch();
  const cudaError_t recorded = cudaEventRecord(local.done, stream);
  return waited != cudaSuccess ? waited : recorded;
}

std::string Channel::TakeError(const std::string& op) {
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

ChannelRegistry& ChannelRegistry::Get() {
  static auto* registry = new ChannelRegistry;  // never destroyed: CUDA may have ended first
  return *registry;
}

Status ChannelRegistry::Look(const std::string& op, const ChannelKey& key,
                             std::shared_ptr<Channel>* channel) {
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

Status ChannelRegistry::Find(const std::string& op, const ChannelKey& key,
                             const ChannelShape& shape, bool in_slab, bool may_make,
                             std::shared_ptr<Channel>* channel) {
  const auto look = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return Look(op, key, channel);
  };
  Status status = look();
  if (!status.ok() || *channel) return status;
  if (!may_make) {
    return Status::Internal(op, ": is being recorded, but its buffer has not been allocated.");
  }
  std::lock_guard<std::mutex> making(making_);
  status = look();  // another device's call may have created it
  if (!status.ok() || *channel) return status;
  auto made = std::make_shared<Channel>();
  status = made->Make(op, key, shape, in_slab, process_);
  if (!status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  *channel = channels_[key] = std::move(made);
  return status;
}

void ChannelRegistry::Release(int64_t buffer) {
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
  for (const auto& channel : unused) channel->Free();
}

void ChannelRegistry::Restore(int64_t buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  released_.erase(buffer);
}

void ChannelRegistry::SetProcess(int64_t process, std::vector<int64_t> ordinals) {
  std::lock_guard<std::mutex> lock(mutex_);
  process_ = process;
  ordinals_ = std::move(ordinals);
}

int64_t ChannelRegistry::NameOf(int32_t ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(ordinals_.begin(), ordinals_.end(), ordinal);
  const int64_t number = found == ordinals_.end() ? ordinal : found - ordinals_.begin();
  return process_ << 16 | number;
}

int64_t ChannelRegistry::ToOrdinal(int64_t entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [process, number] = DeviceEntry::From(entry);
  if (process != process_ || number >= static_cast<int>(ordinals_.size())) return entry;
  return process << 16 | ordinals_[number];
}

std::vector<std::string> ChannelRegistry::TakeErrors() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> errors;
  for (auto& [key, channel] : channels_) {
    std::string error = channel->TakeError("jax_cp_dispatch");
    if (!error.empty()) errors.push_back(std::move(error));
  }
  return errors;
}

// ---- A device's stream for exchanges that run beside the program, and the pairs of calls around
// them.

namespace {

bool IsFine(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess;
}

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
};

struct Streams {
  std::mutex mutex;
  CudaOrder order;
  std::map<int, std::unique_ptr<ExchangeStream>> by_device;
};

Streams& All() {
  static auto* all = new Streams;  // never destroyed: CUDA may have ended first
  return *all;
}

}  // namespace

Status ExchangeStream::Find(const std::string& op, int device, ExchangeStream** found) {
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

int64_t ExchangeStream::NumStarted() {
  Streams& all = All();
  std::lock_guard<std::mutex> lock(all.mutex);
  int64_t num = 0;
  for (auto& [device, one] : all.by_device) {
    if (one != nullptr) num += one->pairs.num_started();
  }
  return num;
}

}  // namespace cpd
