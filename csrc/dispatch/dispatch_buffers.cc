// The registry of dispatch buffers: which ids exist, and the calls that use them.
#include "dispatch/dispatch_buffers.h"

namespace cpd {

DispatchBuffers& DispatchBuffers::Get() {
  static auto* registry = new DispatchBuffers;
  return *registry;
}

int64_t DispatchBuffers::Create() {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_[next_id_].num_created = 1;
  return next_id_++;
}

Status DispatchBuffers::Acquire(int64_t id, const std::string& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  ++found->second.num_in_use;
  return Status::Ok();
}

void DispatchBuffers::Release(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found != buffers_.end() && found->second.num_in_use > 0) --found->second.num_in_use;
}

Status DispatchBuffers::NoSuchBuffer(const std::string& op, int64_t id) const {
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

}  // namespace cpd
