// The registry of communication buffers of overlapped GEMMs: one map under one mutex.
#include "gemm/overlap_buffers.h"

#include <exception>
#include <sstream>

namespace cpd {
namespace {

std::string Calls(int64_t count) {
  return std::to_string(count) + (count == 1 ? " call" : " calls");
}

}  // namespace

OverlapBuffers& OverlapBuffers::Get() {
  static auto* buffers = new OverlapBuffers;
  return *buffers;
}

Status OverlapBuffers::Create(const std::string& op, int64_t id, const OverlapBufferSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  Buffer& buffer = buffers_[id];
  if (buffer.entry.num_created > 0 && buffer.entry.spec.parameters != spec.parameters) {
    return Status::Invalid(op + ": id " + std::to_string(id) + " stands for (" +
                           buffer.entry.spec.parameters + ") already, not for (" + spec.parameters +
                           "): two sets of arguments have the same hash. Change "
                           "an argument that does not matter to you, for example gemm_priority.");
  }
  buffer.entry.spec = spec;
  ++buffer.entry.num_created;
  destroyed_.erase(id);
  return Status::Ok();
}

Status OverlapBuffers::Destroy(const std::string& op, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  OverlapBufferEntry& entry = found->second.entry;
  if (entry.num_created == 1) {
    if (entry.num_in_use > 0) {
      return Status::Invalid(op + ": buffer " + std::to_string(id) + " is in use by " +
                             Calls(entry.num_in_use) +
                             " in flight. Wait for their results, for example with "
                             "jax.block_until_ready, then destroy it.");
    }
    buffers_.erase(found);
    destroyed_.insert(id);
  } else {
    --entry.num_created;
  }
  return Status::Ok();
}

Status OverlapBuffers::DestroyAll(const std::string& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string busy;
  for (const auto& [id, buffer] : buffers_) {
    if (buffer.entry.num_in_use == 0) continue;
    if (!busy.empty()) busy += ", ";
    busy += std::to_string(id) + " (" + Calls(buffer.entry.num_in_use) + ")";
  }
  if (!busy.empty()) {
    return Status::Invalid(op + ": calls in flight use buffers " + busy +
                           "; none has been destroyed. Wait for their results, for example with "
                           "jax.block_until_ready, then destroy all.");
  }
  for (const auto& [id, buffer] : buffers_) destroyed_.insert(id);
  buffers_.clear();
  return Status::Ok();
}

Status OverlapBuffers::Find(const std::string& op, int64_t id, OverlapBufferSpec* spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  *spec = found->second.entry.spec;
  return Status::Ok();
}

std::vector<std::pair<int64_t, OverlapBufferEntry>> OverlapBuffers::List() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<int64_t, OverlapBufferEntry>> entries;
  for (const auto& [id, buffer] : buffers_) entries.emplace_back(id, buffer.entry);
  return entries;
}

Status OverlapBuffers::Lease(const std::string& op, int64_t id, int64_t group, bool has_memory,
                             std::shared_ptr<OverlapBufferLease>* lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  Buffer& buffer = found->second;
  const OverlapBufferSpec& spec = buffer.entry.spec;
  std::vector<char*> memory;
  try {
    if (has_memory) {
      Group& of_group = buffer.groups[group];
      while (of_group.memory.size() < static_cast<size_t>(spec.num_ranks)) {
        of_group.memory.emplace_back(new char[spec.rank_bytes]);  // touched when written
      }
      for (const auto& rank : of_group.memory) memory.push_back(rank.get());
    }
    *lease = std::make_shared<OverlapBufferLease>(id, group, std::move(memory));
  } catch (const std::exception&) {
    std::ostringstream message;
    message << op << ": no memory for buffer " << id << ": " << spec.num_ranks << " ranks of "
            << spec.rank_bytes << " bytes. Create it with a smaller buffer_shape.";
    return {StatusCode::kInternal, message.str()};
  }
  buffer.entry.num_groups = static_cast<int64_t>(buffer.groups.size());
  ++buffer.entry.num_in_use;
  ++buffer.entry.num_calls;
  return Status::Ok();
}

void OverlapBufferLease::Enter(std::function<void()> begin) {
  {
    OverlapBuffers& all = OverlapBuffers::Get();
    std::lock_guard<std::mutex> lock(all.mutex_);
    OverlapBuffers::Group& group = all.buffers_.at(id_).groups.at(group_);
    entered_ = true;
    if (group.is_busy) {
      group.waiting.push_back(std::move(begin));
      return;
    }
    group.is_busy = true;
  }
  begin();
}

OverlapBufferLease::~OverlapBufferLease() {
  std::function<void()> next;
  {
    OverlapBuffers& all = OverlapBuffers::Get();
    std::lock_guard<std::mutex> lock(all.mutex_);
    OverlapBuffers::Buffer& buffer = all.buffers_.at(id_);
    --buffer.entry.num_in_use;
    if (entered_) {
      OverlapBuffers::Group& group = buffer.groups.at(group_);
      if (group.waiting.empty()) {
        group.is_busy = false;
      } else {
        next = std::move(group.waiting.front());
        group.waiting.pop_front();
      }
    }
  }
  if (next) next();
}

Status OverlapBuffers::NoSuchBuffer(const std::string& op, int64_t id) const {
  const bool is_gone = destroyed_.count(id) > 0;
  return Status::Invalid(
      op +
      (is_gone ? ": buffer " + std::to_string(id) + " has been destroyed. "
               : ": there is no buffer " + std::to_string(id) + ". ") +
      "Create it with create_comm_overlap_buffer, in every process that runs the program.");
}

}  // namespace cpd
