// The registry of dispatch buffers: limits under an id, and the calls that use them.
#include "dispatch/dispatch_buffers.h"

#include <algorithm>
#include <sstream>

namespace cpd {
namespace {

Status CheckCapacity(const std::string& op, int64_t capacity) {
  if (capacity < kMostRows) return Status::Ok();
  return Status::Invalid(op + ": capacity is " + std::to_string(capacity) +
                         "; it needs to be below 2**48 rows.");
}

}  // namespace

DispatchBuffers& DispatchBuffers::Get() {
  static auto* registry = new DispatchBuffers;
  return *registry;
}

Status DispatchBuffers::Create(const std::string& op, const DispatchBufferLimits& limits,
                               int64_t* id) {
  if (Status status = CheckCapacity(op, limits.capacity); !status.ok()) return status;
  if (limits.capacity < 1 || limits.row_bytes < 1 || limits.num_groups < 1 ||
      limits.deadline.count() < 1 || limits.deadline > kLongestDeadline) {
    return Status::Invalid(op + ": capacity, row_bytes, deadline and groups need to be positive, " +
                           "and the deadline at most " + std::to_string(kLongestDeadline.count()) +
                           " ms.");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  *id = next_id_++;
  DispatchBufferEntry& entry = buffers_[*id];
  entry.limits = limits;
  entry.num_created = 1;
  return Status::Ok();
}

Status DispatchBuffers::Grow(const std::string& op, int64_t id, int64_t capacity, int64_t row_bytes,
                             int64_t num_groups) {
  if (Status status = CheckCapacity(op, capacity); !status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  DispatchBufferLimits& limits = found->second.limits;
  limits.capacity = std::max(limits.capacity, capacity);
  limits.row_bytes = std::max(limits.row_bytes, row_bytes);
  limits.num_groups = std::max(limits.num_groups, num_groups);
  return Status::Ok();
}

Status DispatchBuffers::Acquire(int64_t id, const std::string& op, int64_t group, int64_t num_rows,
                                int64_t row_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  DispatchBufferEntry& entry = found->second;
  DispatchBufferLimits& limits = entry.limits;
  if (group < 0 || group >= limits.num_groups) {
    std::ostringstream message;
    message << op << ": this rank is in group " << group << " but buffer " << id
            << " is for groups=" << limits.num_groups
            << ", the product of the sizes of the other mesh axes. Create it with groups>="
            << group + 1 << ", or grow_dispatch_buffer(" << id << ", groups=...).";
    return Status::Invalid(message.str());
  }
  if (num_rows > limits.capacity) {
    std::ostringstream message;
    message << op << ": a rank's " << num_rows << " rows do not fit buffer " << id
            << ", whose capacity is " << limits.capacity
            << " rows. Create it with capacity>=" << num_rows << ", or grow_dispatch_buffer(" << id
            << ", capacity=" << num_rows << ").";
    return Status::Invalid(message.str());
  }
  limits.row_bytes = std::max(limits.row_bytes, row_bytes);
  ++entry.num_in_use;
  ++entry.num_calls;
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
