// The registry of dispatch buffers: which ids exist, and the calls that use them.
#pragma once

#include <cstdint>
#include <string>

#include "transport/buffer_registry.h"
#include "transport/transport.h"

namespace cpd {

// Python keeps the limits of a buffer, which it reads when a call is traced. Ids count up from 1
// and are never reused: an id below the next one that is not found has been destroyed.
class DispatchBuffers : public BufferRegistry<BufferUsage> {
 public:
  DispatchBuffers() : BufferRegistry(/*counts_ranks=*/true) {}

  // The registry of this process. Never destroyed: completions may release during exit().
  static DispatchBuffers& Get();

  int64_t Create();

  // One rank enters an exchange. On success the buffer stays in use until Release, which must
  // follow exactly once. An id in use cannot be destroyed, so all ranks of an exchange find the
  // same buffer.
  Status Acquire(int64_t id, const std::string& op);
  void Release(int64_t id);

 private:
  Status NoSuchBuffer(const std::string& op, int64_t id) const override;

  int64_t next_id_ = 1;
};

}  // namespace cpd
