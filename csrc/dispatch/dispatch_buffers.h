// The registry of dispatch buffers: limits under an id, and the calls that use them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "transport/buffer_registry.h"
#include "transport/transport.h"

namespace cpd {

struct DispatchBufferLimits {
  int64_t capacity;    // rows of the result, per rank
  int64_t row_bytes;   // of one row, over all arrays of one call
  int64_t num_groups;  // independent groups of ranks of one call
  std::chrono::milliseconds deadline;
};

// Each rank counts as a call.
struct DispatchBufferEntry : BufferUsage {
  DispatchBufferLimits limits;
};

// Ids count up from 1 and are never reused: an id below the next one that is not found has been
// destroyed.
class DispatchBuffers : public BufferRegistry<DispatchBufferEntry> {
 public:
  DispatchBuffers() : BufferRegistry(/*counts_ranks=*/true) {}

  // The registry of this process. Never destroyed: completions may release during exit().
  static DispatchBuffers& Get();

  // Rejects limits that no call could have.
  Status Create(const std::string& op, const DispatchBufferLimits& limits, int64_t* id);

  // Never shrinks a limit: each becomes the larger of its current and its requested value.
  Status Grow(const std::string& op, int64_t id, int64_t capacity, int64_t row_bytes,
              int64_t num_groups);

  // One rank enters an exchange. On success row_bytes grows to that of the call, and the buffer
  // stays in use until Release, which must follow exactly once. A refused call is not counted. An
  // id in use cannot be destroyed, so all ranks of an exchange find the same buffer. Grow can run
  // between two ranks, so a refusal must fail the execution for all of them.
  Status Acquire(int64_t id, const std::string& op, int64_t group, int64_t num_rows,
                 int64_t row_bytes);
  void Release(int64_t id);

 private:
  Status NoSuchBuffer(const std::string& op, int64_t id) const override;

  int64_t next_id_ = 1;
};

}  // namespace cpd
