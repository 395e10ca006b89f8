// The registry of dispatch buffers: which ids exist, and the calls that use them.
#include "dispatch/dispatch_buffers.h"

#include <sstream>

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
  std::ostringstream message;
  if (id > 0 && id < next_id_) {
    message << op << ": buffer " << id
            << " has been destroyed. Create another with create_dispatch_buffer, and recompile the "
               "programs that use it.";
  } else {
    message << op << ": there is no buffer " << id << "; ";
    if (next_id_ == 1) {
      message << "none has been created";
    } else {
      message << "ids so far are 1 to " << next_id_ - 1;
    }
    message << ". Pass an id that create_dispatch_buffer returned in this process.";
  }
  return Status::Invalid(message.str());
}

}  // namespace cpd
