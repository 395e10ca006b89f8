// Memory at the same offset on several GPUs, which read and write each other's: through pointers,
// or over a network.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// A GPU: the number of its process and its ordinal there.
struct DeviceEntry {
  int64_t process;
  int device;

  static DeviceEntry From(int64_t packed) {
    return {packed >> 16, static_cast<int>(packed & 0xffff)};
  }
};

// Memory on GPUs of this process. For N ranks on one GPU, N blocks there.
Status AllocateOnDevices(const std::string& op, const std::vector<DeviceEntry>& devices,
                         int64_t bytes, std::vector<char*>* memory);
void FreeOnDevices(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory);

// One slab of memory per process, which all others reach once these are connected. Processes that
// map each other's slabs form a group; other groups are reached over a network. Each process
// allocates from its slab independently: ranks that make the same calls in the same order get the
// same offsets, and a message in the exchange detects those that do not.
class Slab {
 public:
  static Slab& Get();

  // `bases`: each process's slab, as mapped here; for other groups, the own one.
  void Set(std::vector<char*> bases, int64_t bytes, std::vector<int64_t> memory_groups);

  // Whether some of these devices reach others only over a network.
  bool NeedsNetwork(const std::vector<int64_t>& devices);
  bool IsRemote(int64_t process, int64_t other);

  // Freed memory is reused only for the same layout, since it still contains old signals.
  // `generation` counts the uses; signals of a later one must be larger.
  Status Allocate(const std::string& op, const std::vector<DeviceEntry>& devices, int64_t bytes,
                  const std::string& layout, std::vector<char*>* memory, int64_t* generation);
  void Free(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory,
            const std::string& layout, int64_t generation);

 private:
  std::mutex mutex_;
  std::vector<char*> bases_;
  std::vector<int64_t> memory_groups_;  // by process
  int64_t bytes_ = 0;
  int64_t used_ = 0;
  struct Freed {
    int64_t offset, generation;
  };
  std::multimap<std::string, Freed> freed_;  // by layout
};

}  // namespace cpd
