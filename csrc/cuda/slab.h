// Slabs of memory of each process, from which the processes allocate channels together. Needs no
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

// How a process gets another slab when its own are full, with a handle by which others map it.
struct SlabGrowth {
  std::function<Status(int64_t bytes, char** memory, std::string* handle)> make;
  std::function<Status(const std::string& handle, char** memory)> open;
};

// The same in all processes.
inline std::string NameOf(const SlabRequest& request) {
  std::string name = request.layout;
  for (const int64_t process : request.processes) name += "/" + std::to_string(process);
  return name;
}

// Every process allocates in its own slabs and tells the others where: what it allocates for other
// channels, and in which order, does not matter to them. Those that map each other's slabs form a
// group. Other groups are reached over a network, which names memory of another slab by the same
// place in the own one; then each process has one slab, which does not grow.
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
    own_.clear();
    if (!bases_.empty()) own_.push_back({bases_[process], bytes, 0, ""});
    opened_.clear();
    growth_ = {};
    series_.clear();
  }

  void SetGrowth(SlabGrowth growth) {
    std::lock_guard<std::mutex> lock(mutex_);
    growth_ = std::move(growth);
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
    status = Find(request, messages, memory);
    if (!status.ok()) memory->clear();
    if (status.code == StatusCode::kDeadlineExceeded) return status;
    const std::string mine = std::exchange(series.begun, "");
    const int64_t number = series.next++;
    if (status.ok()) {
      series.used[number] = Place::From(mine);
    } else if (mine[0] != kFailure) {
      series.spare.push_back(Place::From(mine));
    }
    return status;
  }

  // Frees it, after the last work of this process that uses it.
  void Free(const SlabRequest& request, const std::vector<char*>& memory) {
    if (memory.empty()) return;
    Series& series = series_[NameOf(request)];
    for (size_t r = 0; r < memory.size(); ++r) {
      if (request.processes[r] != process_) continue;
      for (auto at = series.used.begin(); at != series.used.end(); ++at) {
        if (InOwn(at->second) != memory[r]) continue;
        series.free.insert(*at);
        series.used.erase(at);
        return;
      }
    }
  }

 private:
  static constexpr char kFailure = '!';  // begins a message that is not a place

  // A place in the slabs of a process, and as text "slab offset handle".
  struct Place {
    size_t slab = 0;
    int64_t offset = -1;
    std::string handle = {};  // of the slab; none of the first one, which all others have mapped

    static Place From(const std::string& text) {
      std::istringstream words(text);
      Place place;
      words >> place.slab >> place.offset >> place.handle;
      return place;
    }
    std::string Text() const {
      return std::to_string(slab) + " " + std::to_string(offset) + " " + handle;
    }
  };

  struct Own {
    char* base;
    int64_t bytes, used;
    std::string handle;
  };

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
    std::string begun;                    // where the next one is, if others may know it
    std::map<int64_t, Place> used, free;  // by number: places in this process's slabs
    std::vector<Place> spare;             // places that no other process has used
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
    Place place;
    const int64_t number = FirstInAll(messages);
    if (number < 0) {
      status = Take(request, series, &place);
    } else {
      place = series->free.at(number);
      series->free.erase(number);
    }
    if (status.ok()) status = clear(InOwn(place), request.bytes);
    series->begun = status.ok() ? place.Text() : kFailure + status.message;
    if (!status.ok() && place.offset >= 0) series->spare.push_back(place);
    return Status::Ok();
  }

  char* InOwn(const Place& place) {
    std::lock_guard<std::mutex> lock(mutex_);
    return own_[place.slab].base + place.offset;
  }

  // Maps the places that all processes have chosen. If one is not in a first slab, all hear whether
  // the others could map it.
  Status Find(const SlabRequest& request, const std::vector<std::string>& messages,
              std::vector<char*>* memory) {
    std::vector<Place> places;
    for (const std::string& text : messages) {
      if (text[0] == kFailure) return Status::Invalid(text.substr(1));
      places.push_back(Place::From(text));
    }
    Status status;
    memory->clear();
    for (size_t r = 0; r < places.size() && status.ok(); ++r) {
      char* base = nullptr;
      status = BaseOf(request.processes[r], places[r], &base);
      if (status.ok()) memory->push_back(base + places[r].offset);
    }
    if (std::all_of(places.begin(), places.end(), [](const Place& p) { return p.slab == 0; })) {
      return status;
    }
    std::vector<std::string> said;
    const Status met = Meet(request, "mapped", status.message, &said);
    if (!met.ok()) return met;
    for (const std::string& why : said) {
      if (!why.empty()) return Status::Invalid(why);
    }
    return status;
  }

  // A slab of a process, as mapped here.
  Status BaseOf(int64_t process, const Place& place, char** base) {
    std::lock_guard<std::mutex> lock(mutex_);
    char*& opened = opened_[{process, place.slab}];
    Status status;
    if (process == process_) {
      opened = own_[place.slab].base;
    } else if (place.slab == 0) {
      opened = bases_[process];
    } else if (opened == nullptr) {
      status =
          growth_.open ? growth_.open(place.handle, &opened) : Status::Internal("it cannot grow");
      if (!status.ok()) {
        status = Status::Invalid("process ", process_, " cannot map new memory of process ",
                                 process, ": ", status.message);
      }
    }
    *base = opened;
    return status;
  }

  // Memory that no other process knows.
  Status Take(const SlabRequest& request, Series* series, Place* place) {
    if (!series->spare.empty()) {
      *place = series->spare.back();
      series->spare.pop_back();
      return Status::Ok();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t bytes = kernels::AlignUp(request.bytes);
    const auto has_room = [&](const Own& own) { return own.used + bytes <= own.bytes; };
    auto own = std::find_if(own_.begin(), own_.end(), has_room);
    if (own == own_.end()) {
      Own more{nullptr, std::max(bytes, bytes_), 0, ""};
      const Status grown = growth_.make ? growth_.make(more.bytes, &more.base, &more.handle)
                                        : Status::Internal("they cannot grow");
      if (!grown.ok()) {
        int64_t taken = 0, all = 0;
        for (const Own& one : own_) taken += one.used, all += one.bytes;
        return Status::Invalid(
            "process ", process_, " needs ", bytes, " more bytes of symmetric memory, of ", all,
            " bytes ", taken, " are taken: ", grown.message,
            ". Start with a larger JAX_CP_DISPATCH_SYMMETRIC_BYTES, or a smaller "
            "XLA_PYTHON_CLIENT_MEM_FRACTION.");
      }
      own = own_.insert(own_.end(), std::move(more));
    }
    *place = {static_cast<size_t>(own - own_.begin()), own->used, own->handle};
    own->used += bytes;
    return Status::Ok();
  }

  std::mutex mutex_;  // protects all but series_; not held while processes meet
  std::vector<char*> bases_;
  std::vector<int64_t> memory_groups_;  // by process
  int64_t process_ = 0;
  int64_t bytes_ = 0;
  std::vector<Own> own_;                                // slabs of this process
  std::map<std::pair<int64_t, size_t>, char*> opened_;  // by process and slab
  SlabGrowth growth_;
  Agree agree_;
  std::map<std::string, Series> series_;
};

}  // namespace cpd
