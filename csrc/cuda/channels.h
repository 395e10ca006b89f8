// The registry of channels: GPU memory through which the ranks of one kind of call exchange data.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/memory.h"
#include "cuda/slab.h"
#include "gpu_schedule/exchange_pairs.h"
#include "kernels/call.h"
#include "transport/transport.h"

namespace cpd {

// The key of a channel. Calls with the same key share a channel and run in sequence.
struct ChannelKey {
  std::string layout;            // everything that determines the memory layout
  std::vector<int64_t> buffers;  // ids of registered buffers, per operand group; 0: none
  std::vector<int64_t> devices;  // of the ranks, in order
  const char* maker = "create_dispatch_buffer";  // creates those buffers, for messages

  bool operator<(const ChannelKey& other) const;
};

// The sizes of a channel.
struct ChannelShape {
  int64_t bytes;                       // shared among ranks; bytes of each
  int64_t local_bytes;                 // of each local rank; starts with kernels::State
  int num_local;                       // ranks on one device: one or all
  int num_groups;                      // plans, for messages
  std::chrono::milliseconds deadline;  // for other processes to make it too
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
    cudaEvent_t done = nullptr;  // the last call that was not recorded
    std::mutex mutex;            // held while a call is enqueued
  };

  const std::vector<char*>& memory() const { return memory_; }  // by rank
  const Local& local(int first_rank) const { return locals_.at(first_rank); }

  // Enqueues a call after the previous one on this device, if XLA runs them on different streams.
  // Not for calls that are being recorded: a recording cannot wait for work outside of it. XLA
  // orders these; Python rejects the modes in which it does not.
  cudaError_t Enqueue(int first_rank, cudaStream_t stream, const std::function<void()>& launch);

  // The first error that a device found since the last call; empty if there is none.
  std::string TakeError(const std::string& op);

 private:
  friend class ChannelRegistry;

  Status Make(const std::string& op, const ChannelKey& key, const ChannelShape& shape, bool in_slab,
              int64_t process);
  void Free();

  Status Allocate(const std::string& op, int64_t process);

  SlabRequest request_;  // where it is in slabs
  std::vector<DeviceEntry> devices_;
  std::vector<char*> memory_;
  std::map<int, Local> locals_;  // by the first rank of a device of this process
  int64_t bytes_ = 0;
  int num_groups_ = 1;
  bool in_slab_ = false;
};

class ChannelRegistry {
 public:
  static ChannelRegistry& Get();

  // The channel of a call. The first device that asks creates it for all devices of this process,
  // but not while a stream is being recorded.
  Status Find(const std::string& op, const ChannelKey& key, const ChannelShape& shape, bool in_slab,
              bool may_make, std::shared_ptr<Channel>* channel);

  // Frees the channels of a registered buffer once work on their devices is over. Later calls that
  // name it fail.
  void Release(int64_t buffer);

  // Allows an id again whose buffer has been created again.
  void Restore(int64_t buffer);

  // Errors that no call has reported yet.
  std::vector<std::string> TakeErrors();

  // How JAX counts the processes, and the devices of this one: `ordinals` are CUDA's numbers.
  void SetProcess(int64_t process, std::vector<int64_t> ordinals);
  // A device of this process as the device table names it; and the other way round, where devices
  // of other processes stay as they are.
  int64_t NameOf(int32_t ordinal);
  int64_t ToOrdinal(int64_t entry);

 private:
  // Sets `channel` if it exists. Called with `mutex_` held.
  Status Look(const std::string& op, const ChannelKey& key, std::shared_ptr<Channel>* channel);

  // Serializes the creation of channels. Allocating and freeing may wait for a device on which a
  // rank waits for another's call; with a separate mutex this does not block calls whose channel
  // exists.
  std::mutex making_, mutex_;
  std::map<ChannelKey, std::shared_ptr<Channel>> channels_;
  std::set<int64_t> released_;
  int64_t process_ = 0;
  std::vector<int64_t> ordinals_;
};

// ---- A device's stream for exchanges that run beside the program, and the pairs of calls around
// them.

// One per device: its exchanges run one after another, in the same order on all ranks.
struct ExchangeStream {
  explicit ExchangeStream(StreamOrder* order) : pairs(order) {}

  // That of `device`, which must be current. Made on first use, and kept: call it first before a
  // program runs.
  static Status Find(const std::string& op, int device, ExchangeStream** found);

  // The exchanges of all devices that went on after their first call.
  static int64_t NumStarted();

  cudaStream_t stream = nullptr;
  ExchangePairs pairs;
};

}  // namespace cpd
