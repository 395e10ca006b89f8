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
  static DispatchBuffers& Get() {
    static auto* registry = new DispatchBuffers;
    return *registry;
  }

  int64_t Create() {
    std::lock_guard<std::mutex> lock(mutex_);
    buffers_[next_id_].num_created = 1;
    return next_id_++;
  }

  // One rank enters an exchange. On success the buffer stays in use until Release, which must
  // follow exactly once. An id in use cannot be destroyed, so all ranks of an exchange find the
  // same buffer.
  Status Acquire(int64_t id, const std::string& op) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(id);
    if (found == buffers_.end()) return NoSuchBuffer(op, id);
    ++found->second.num_in_use;
    return Status::Ok();
  }

  void Release(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(id);
    if (found != buffers_.end() && found->second.num_in_use > 0) --found->second.num_in_use;
  }

 private:
  Status NoSuchBuffer(const std::string& op, int64_t id) const override {
    if (id > 0 && id < next_id_) {
      return Status::Invalid(op, ": buffer ", id,
                             " has been destroyed. Create another with create_dispatch_buffer, and "
                             "recompile the programs that use it.");
    }
    const std::string known = next_id_ == 1 ? "none has been created"
                                            : "ids so far are 1 to " + std::to_string(next_id_ - 1);
    return Status::Invalid(op, ": there is no buffer ", id, "; ", known,
                           ". Pass an id that create_dispatch_buffer returned in this process.");
  }

  int64_t next_id_ = 1;
};

}  // namespace cpd
