// One slab of memory per process, from which the processes allocate channels together. Needs no
// CUDA.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// Publishes a message of this process under a name, and reads those of all `processes`, in their
// order. A process that publishes twice repeats itself.
using Agree = std::function<Status(
    const std::string& name, const std::string& message, const std::vector<int64_t>& processes,
    std::chrono::milliseconds deadline, std::vector<std::string>* messages)>;

// Memory that some processes allocate together.
struct SlabRequest {
  std::string op;                  // for messages
  std::string layout;              // equal in all processes
  std::vector<int64_t> processes;  // of the ranks, in order
  int64_t bytes;
  std::chrono::milliseconds deadline;  // for the other processes to come
};

// Fills memory of this process with zeros.
using Clear = std::function<Status(char* memory, int64_t bytes)>;

// Every process allocates in its own slab and tells the others where: what it allocates for other
// channels, and in which order, does not matter to them. Those that map each other's slabs form a
// group. Other groups are reached over a network, which names memory of another slab by the same
// place in the own one.
//
// Freed memory is used again for the same layout and processes, once all of them have freed it.
// Only then do they clear it: before, one of them might still read it, or signal there.
class Slab {
 public:
  static Slab& Get();

  // `bases`: each process's slab, as mapped here; for other groups, the own one.
  void Set(std::vector<char*> bases, int64_t bytes, std::vector<int64_t> memory_groups,
           int64_t process);
  void SetAgree(Agree agree);

  // Whether some of these processes reach others only over a network.
  bool NeedsNetwork(const std::vector<int64_t>& processes);
  bool IsRemote(int64_t process, int64_t other);

  // Finds the memory of each rank. If another process does not come, or fails, this one may try
  // again. Not at the same time as itself or Free.
  Status Allocate(const SlabRequest& request, const Clear& clear, std::vector<char*>* memory);

  // Frees it, after the last work of this process that uses it.
  void Free(const SlabRequest& request, const std::vector<char*>& memory);

 private:
  // The channels of one layout over the same processes. Each has a number, the same in all of them.
  struct Series {
    int64_t next = 0;
    std::string begun;                      // where the next one is, if others may know it
    std::map<int64_t, int64_t> used, free;  // by number: places in this process's slab
    std::vector<int64_t> spare;             // places that no other process has used
  };

  Status Meet(const SlabRequest& request, const std::string& step, const std::string& message,
              std::vector<std::string>* messages);
  Status Begin(const SlabRequest& request, const Clear& clear, Series* series);
  Status Take(const SlabRequest& request, Series* series, int64_t* place);

  std::mutex mutex_;  // protects all but series_; not held while processes meet
  std::vector<char*> bases_;
  std::vector<int64_t> memory_groups_;  // by process
  int64_t process_ = 0;
  int64_t bytes_ = 0;
  int64_t used_ = 0;
  Agree agree_;
  std::map<std::string, Series> series_;
};

}  // namespace cpd
