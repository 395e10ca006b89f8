// One slab of memory per process, from which the processes allocate channels together. Needs no
// CUDA.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/call.h"
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

// The same in all processes.
inline std::string NameOf(const SlabRequest& request) {
  std::string name = request.layout;
  for (const int64_t process : request.processes) name += "/" + std::to_string(process);
  return name;
}

// Every process allocates in its own slab and tells the others where: what it allocates for other
// channels, and in which order, does not matter to them. Those that map each other's slabs form a
// group. Other groups are reached over a network, which names memory of another slab by the same
// place in the own one.
//
// Freed memory is used again for the same layout and processes, once all of them have freed it.
// Only then do they clear it: before, one of them might still read it, or signal there.
class Slab {
 public:
  static Slab& Get() {
    static auto* slab = new Slab;
    return *slab;
  }

  // `bases`: each process's slab, as mapped here; for other groups, the own one.
  void Set(std::vector<char*> bases, int64_t bytes, std::vector<int64_t> memory_groups,
           int64_t process) {
    std::lock_guard<std::mutex> lock(mutex_);
    bases_ = std::move(bases);
    memory_groups_ = std::move(memory_groups);
    process_ = process;
    bytes_ = bytes;
    used_ = 0;
    series_.clear();
  }

  void SetAgree(Agree agree) {
    std::lock_guard<std::mutex> lock(mutex_);
    agree_ = std::move(agree);
  }

  // Whether some of these processes reach others only over a network.
  bool NeedsNetwork(const std::vector<int64_t>& processes) {
    return std::any_of(processes.begin(), processes.end(),
                       [&](int64_t process) { return IsRemote(processes[0], process); });
  }

  bool IsRemote(int64_t process, int64_t other) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto num_processes = static_cast<int64_t>(memory_groups_.size());
    return process < num_processes && other < num_processes &&
           memory_groups_[process] != memory_groups_[other];
  }

  // Finds the memory of each rank. If another process does not come, or fails, this one may try
  // again. Not at the same time as itself or Free.
  Status Allocate(const SlabRequest& request, const Clear& clear, std::vector<char*>* memory) {
    const std::vector<int64_t>& processes = request.processes;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto num_processes = static_cast<int64_t>(bases_.size());
      for (const int64_t process : processes) {
        if (process >= 0 && process < num_processes) continue;
        return Status::Invalid(
            num_processes == 0
                ? "the processes share no memory yet. Call jax_cp_dispatch.initialize() in every "
                  "process, before the program is compiled."
                : "process " + std::to_string(process) +
                      " did not take part in jax_cp_dispatch.initialize().");
      }
    }
    Series& series = series_[NameOf(request)];
    Status status = series.begun.empty() ? Begin(request, clear, &series) : Status::Ok();
    std::vector<std::string> messages;
    if (status.ok()) status = Meet(request, "place", series.begun, &messages);
    if (!status.ok()) return status;
    const std::string mine = std::exchange(series.begun, "");
    const int64_t number = series.next++;
    for (const std::string& theirs : messages) {
      if (theirs[0] != kFailure) continue;
      if (mine[0] != kFailure) series.spare.push_back(std::stoll(mine));
      return Status::Invalid(theirs.substr(1));
    }
    series.used[number] = std::stoll(mine);
    memory->clear();
    for (size_t r = 0; r < processes.size(); ++r) {
      memory->push_back(bases_[processes[r]] + std::stoll(messages[r]));
    }
    return status;
  }

  // Frees it, after the last work of this process that uses it.
  void Free(const SlabRequest& request, const std::vector<char*>& memory) {
    if (memory.empty()) return;
    Series& series = series_[NameOf(request)];
    for (size_t r = 0; r < memory.size(); ++r) {
      if (request.processes[r] != process_) continue;
      const int64_t place = memory[r] - bases_[process_];
      for (auto at = series.used.begin(); at != series.used.end(); ++at) {
        if (at->second != place) continue;
        series.free.insert(*at);
        series.used.erase(at);
        return;
      }
    }
  }

 private:
  static constexpr char kFailure = '!';  // begins a message that is not a place

  static std::set<int64_t> NumbersIn(const std::string& text) {
    std::istringstream words(text);
    std::set<int64_t> numbers;
    for (int64_t number; words >> number;) numbers.insert(number);
    return numbers;
  }

  // The first number that all messages have; -1: none.
  static int64_t FirstInAll(const std::vector<std::string>& messages) {
    std::set<int64_t> left = NumbersIn(messages[0]);
    for (const std::string& message : messages) {
      const std::set<int64_t> its = NumbersIn(message);
      for (auto at = left.begin(); at != left.end();)
        at = its.count(*at) ? std::next(at) : left.erase(at);
    }
    return left.empty() ? -1 : *left.begin();
  }

  // The channels of one layout over the same processes. Each has a number, the same in all of them.
  struct Series {
    int64_t next = 0;
    std::string begun;                      // where the next one is, if others may know it
    std::map<int64_t, int64_t> used, free;  // by number: places in this process's slab
    std::vector<int64_t> spare;             // places that no other process has used
  };

  Status Meet(const SlabRequest& request, const std::string& step, const std::string& message,
              std::vector<std::string>* messages) {
    const auto& processes = request.processes;
    if (std::all_of(processes.begin(), processes.end(), [&](int64_t p) { return p == process_; })) {
      messages->assign(processes.size(), message);
      return Status::Ok();
    }
    if (!agree_) return Status::Internal("the processes cannot agree on memory");
    const std::string name = NameOf(request);
    std::ostringstream key;  // names of keys may be limited
    key << std::hex << HashOf(name) << "/" << std::dec << series_[name].next << "/" << step;
    return agree_(key.str(), message, processes, request.deadline, messages);
  }

  // Chooses and clears the memory of the next channel: some that all processes have freed, or
  // other.
  Status Begin(const SlabRequest& request, const Clear& clear, Series* series) {
    std::string numbers;
    for (const auto& [number, place] : series->free) numbers += std::to_string(number) + " ";
    std::vector<std::string> messages;
    Status status = Meet(request, "free", numbers, &messages);
    if (!status.ok()) return status;
    int64_t place = -1;
    const int64_t number = FirstInAll(messages);
    if (number < 0) {
      status = Take(request, series, &place);
    } else {
      place = series->free.at(number);
      series->free.erase(number);
    }
    if (status.ok()) status = clear(bases_[process_] + place, request.bytes);
    series->begun = status.ok() ? std::to_string(place) : kFailure + status.message;
    if (!status.ok() && place >= 0) series->spare.push_back(place);
    return Status::Ok();
  }

  // Memory that no other process knows.
  Status Take(const SlabRequest& request, Series* series, int64_t* place) {
    if (!series->spare.empty()) {
      *place = series->spare.back();
      series->spare.pop_back();
      return Status::Ok();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t bytes = kernels::AlignUp(request.bytes);
    if (used_ + bytes > bytes_) {
      return Status::Invalid("process ", process_, " needs ", bytes,
                             " more bytes of symmetric memory, of ", bytes_, " bytes ", used_,
                             " are taken. Start with a larger JAX_CP_DISPATCH_SYMMETRIC_BYTES.");
    }
    *place = used_;
    used_ += bytes;
    return Status::Ok();
  }

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
