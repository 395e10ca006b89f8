// The registry of communication buffers of overlapped GEMMs: the description under an id, the
// memory, and the calls that use it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gemm/comm_overlap.h"
#include "transport/buffer_registry.h"
#include "transport/transport.h"

namespace cpd {

struct OverlapBufferSpec {
  OverlapConfig config;
  int64_t num_ranks = 1;
  int64_t rank_bytes = 0;  // of one rank in one group
  DataType type = DataType::kOther;
  std::string parameters;  // all of them, as text: equal texts share one buffer
};

struct OverlapBufferEntry : BufferUsage {
  OverlapBufferSpec spec;
  int64_t num_groups = 0;  // that have memory
};

struct OverlapBuffer : OverlapBufferEntry {
  struct Group {
    std::vector<std::unique_ptr<char[]>> memory;  // by rank
    bool is_busy = false;
    std::deque<std::function<void()>> waiting;  // calls that have met, in that order
  };
  std::map<int64_t, Group> groups;
};

class OverlapBufferLease;

class OverlapBuffers : public BufferRegistry<OverlapBufferEntry, OverlapBuffer> {
 public:
  OverlapBuffers() : BufferRegistry(/*counts_ranks=*/false) {}

  static OverlapBuffers& Get();  // never destroyed: schedules may end during exit()

  // Allocates no memory. Rejects an id that denotes a different description.
  Status Create(const std::string& op, int64_t id, const OverlapBufferSpec& spec);

  // One call of one group of ranks: the buffer exists until the lease ends. The first call of a
  // group allocates the memory. A call that has its own memory passes `has_memory` false.
  Status Lease(const std::string& op, int64_t id, int64_t group, bool has_memory,
               std::shared_ptr<OverlapBufferLease>* lease);

 private:
  friend class OverlapBufferLease;

  Status NoSuchBuffer(const std::string& op, int64_t id) const override;
  void Destroyed(int64_t id) override { destroyed_.insert(id); }

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

  // Calls `begin` once no other call uses the memory: now, or when that call's lease ends.
  void Enter(std::function<void()> begin);

 private:
  const int64_t id_;
  const int64_t group_;
  const std::vector<char*> memory_;
  bool entered_ = false;
};

}  // namespace cpd
