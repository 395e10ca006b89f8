// What ranks contribute to an overlapped GEMM, the registry of its buffers, and its plan.
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
#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "transport/buffer_registry.h"
#include "transport/transport.h"

namespace cpd {

// ---- One rank's contribution to an overlapped GEMM, and the parts of it that other processes
// read.

// Pointers stay valid until the exchange is over.
class OverlapContribution final : public Contribution {
 public:
  // `problem` has no memory yet; its configuration is that of the registered buffer, if there is
  // one.
  OverlapContribution(const OverlapProblem& problem, RankMemory memory)
      : memory_(memory),
        operands_(OperandsForPeers(problem)),
        buffer_bytes_(BufferBytes(problem)),
        shared_(operands_.size()) {}

  // The operands that peers read, in the order of the schedules, then the buffer.
  std::vector<SharedArray> SharedArrays() override {
    std::vector<SharedArray> arrays;
    for (size_t i = 0; i < operands_.size(); ++i) {
      arrays.push_back({&shared_[i], operands_[i].num_bytes});
    }
    arrays.push_back({&shared_buffer_, buffer_bytes_});
    return arrays;
  }

  // Between processes. For a local rank: adds the copies that stage its operands, and returns its
  // memory with the shared buffer. For a rank elsewhere: returns what this process can read of it.
  RankMemory Share(WorkList* work) const {
    constexpr int64_t kPieceBytes = 1 << 20;  // copied at a time
    RankMemory memory = memory_;
    for (size_t i = 0; i < operands_.size(); ++i) {
      const auto [place, num_bytes] = operands_[i];
      if (memory.is_elsewhere) {
        memory.*place = shared_[i];
        continue;
      }
      for (int64_t begin = 0; begin < num_bytes; begin += kPieceBytes) {
        work->staging.push_back(
            {shared_[i] + begin, memory.*place + begin, std::min(kPieceBytes, num_bytes - begin)});
      }
    }
    memory.buffer = shared_buffer_;
    if (!memory.is_elsewhere && buffer_bytes_ > 0) {
      work->written.push_back({shared_buffer_, buffer_bytes_});
    }
    return memory;
  }

  const RankMemory& memory() const { return memory_; }

 private:
  struct Operand {
    const char* RankMemory::* place;
    int64_t num_bytes;
  };

  static std::vector<Operand> OperandsForPeers(const OverlapProblem& p) {
    const bool gathers = p.config.type == CommType::kAllGather;
    if (p.config.is_bulk()) {
      const int64_t rows = p.rows.num_batches * (gathers ? p.rows.capacity : p.rows.total());
      return {{&RankMemory::aux_in, rows * p.aux_width * ElementBytes(p.aux_type)}};
    }
    // Without copies the GEMM of a reduce-scatter multiplies the operands of all ranks.
    const bool multiplies_all =
        !gathers && p.config.method == CommMethod::kRingExchange && !p.config.copies;
    std::vector<Operand> operands;
    if (gathers || multiplies_all) {
      operands = {{&RankMemory::lhs, OwnLhsRows(p) * p.k * ElementBytes(p.lhs_type)},
                  {&RankMemory::lhs_scales, ScalesBytes(p, /*of_lhs=*/true)}};
    }
    if (multiplies_all) {
      operands.push_back({&RankMemory::rhs, p.k * p.n * ElementBytes(p.rhs_type)});
      operands.push_back({&RankMemory::rhs_scales, ScalesBytes(p, /*of_lhs=*/false)});
    }
    return operands;
  }

  RankMemory memory_;
  const std::vector<Operand> operands_;
  const int64_t buffer_bytes_;
  std::vector<char*> shared_;  // by operand
  char* shared_buffer_ = nullptr;
};

// ---- The registry of communication buffers of overlapped GEMMs: the description under an id, the
// memory, and the calls that use it.

struct OverlapBufferSpec {
  OverlapConfig config;
  int64_t num_ranks = 1;
  int64_t rank_bytes = 0;  // of one rank in one group
  DataType type = DataType::kOther;
  std::string parameters;  // all of them, as text: equal texts share one buffer
};

struct OverlapBuffer : BufferUsage {
  struct Group {
    std::vector<std::unique_ptr<char[]>> memory;  // by rank
    bool is_busy = false;
    std::deque<std::function<void()>> waiting;  // calls that have met, in that order
  };

  OverlapBufferSpec spec;
  std::map<int64_t, std::shared_ptr<Group>> groups;  // that have memory
};

class OverlapBufferLease;

class OverlapBuffers : public BufferRegistry<OverlapBuffer> {
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

// ---- Turns the contributions to one overlapped GEMM, and its buffer, into a schedule that runs.

// Gives `problem` the configuration of a registered buffer if the two match. `op` begins every
// message.
Status ConfigureByBuffer(const std::string& op, int64_t buffer_id, OverlapProblem* problem);

// Contributions are `OverlapContribution`s; `problem` has no memory yet. With a nonzero
// `buffer_id`, the registered buffer is in use until the work is over. Within one process its
// memory holds the chunks, and calls take turns. Between processes each call uses memory of the
// segments, since two processes could take turns in different orders.
Status PlanOverlap(const Exchange& exchange, OverlapProblem problem, int64_t buffer_id,
                   GemmFunction gemm,
                   const std::vector<std::unique_ptr<Contribution>>& contributions, WorkList* work);

}  // namespace cpd
