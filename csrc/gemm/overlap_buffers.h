// The registry of communication buffers of overlapped GEMMs: what an id stands for, its memory, and
// who is using it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gemm/comm_overlap.h"
#include "transport/transport.h"

namespace cpd {

struct OverlapBufferSpec {
  OverlapConfig config;
  int64_t num_ranks = 1;
  int64_t rank_bytes = 0;  // of one rank in one group
  DataType type = DataType::kOther;
  std::string parameters;  // all of them, as text: equal texts share one buffer
};

struct OverlapBufferEntry {
  OverlapBufferSpec spec;
  int64_t num_created = 0;  // and not yet destroyed
  int64_t num_in_use = 0;   // calls in flight
  int64_t num_calls = 0;    // so far
  int64_t num_groups = 0;   // that have memory
};

class OverlapBufferLease;

// All functions may be called from any thread. `op` begins every message.
class OverlapBuffers {
 public:
  static OverlapBuffers& Get();  // never destroyed: schedules may end during exit()

  // Takes no memory. An id that stands for something else is refused.
  Status Create(const std::string& op, int64_t id, const OverlapBufferSpec& spec);

  // As often as it was created. Refused the last time while a call uses it.
  Status Destroy(const std::string& op, int64_t id);

  // Destroys every buffer, or none if one of them is in use.
  Status DestroyAll(const std::string& op);

  Status Find(const std::string& op, int64_t id, OverlapBufferSpec* spec);

  std::vector<std::pair<int64_t, OverlapBufferEntry>> List();

  // One call of one group of ranks: the buffer stays until the lease is gone. The first of a group
  // takes the memory. A call that has memory of its own can do without.
  Status Lease(const std::string& op, int64_t id, int64_t group, bool has_memory,
               std::shared_ptr<OverlapBufferLease>* lease);

 private:
  friend class OverlapBufferLease;

  struct Group {
    std::vector<std::unique_ptr<char[]>> memory;  // by rank
    bool is_busy = false;
    std::deque<std::function<void()>> waiting;  // calls that have met, in that order
  };
  struct Buffer {
    OverlapBufferEntry entry;
    std::map<int64_t, Group> groups;
  };

  Status NoSuchBuffer(const std::string& op, int64_t id) const;  // with the lock held

  std::mutex mutex_;
  std::map<int64_t, Buffer> buffers_;
  std::set<int64_t> destroyed_;
};

class OverlapBufferLease {
 public:
  OverlapBufferLease(int64_t id, int64_t group, std::vector<char*> memory)
      : id_(id), group_(group), memory_(std::move(memory)) {}
  ~OverlapBufferLease();
  OverlapBufferLease(const OverlapBufferLease&) = delete;
  OverlapBufferLease& operator=(const OverlapBufferLease&) = delete;

  char* memory(int rank) const { return memory_[rank]; }

  // Calls `begin` as soon as no other call uses the memory: now, or when that call's lease ends.
  void Enter(std::function<void()> begin);

 private:
  const int64_t id_;
  const int64_t group_;
  const std::vector<char*> memory_;
  bool entered_ = false;
};

}  // namespace cpd
