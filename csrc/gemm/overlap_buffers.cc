// The registry of communication buffers of overlapped GEMMs: descriptions and memory under ids.
#include "gemm/overlap_buffers.h"

#include <exception>

namespace cpd {

OverlapBuffers& OverlapBuffers::Get() {
  static auto* buffers = new OverlapBuffers;
  return *buffers;
}

Status OverlapBuffers::Create(const std::string& op, int64_t id, const OverlapBufferSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  OverlapBuffer& buffer = buffers_[id];
  if (buffer.num_created > 0 && buffer.spec.parameters != spec.parameters) {
    return Status::Invalid(op, ": id ", id, " already denotes (", buffer.spec.parameters,
                           "), not (", spec.parameters,
                           "): two sets of arguments have the same hash. Change "
                           "an argument that does not matter to you, for example gemm_priority.");
  }
  buffer.spec = spec;
  ++buffer.num_created;
  destroyed_.erase(id);
  return Status::Ok();
}

Status OverlapBuffers::Lease(const std::string& op, int64_t id, int64_t group, bool has_memory,
                             std::shared_ptr<OverlapBufferLease>* lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  OverlapBuffer& buffer = found->second;
  const OverlapBufferSpec& spec = buffer.spec;
  std::vector<char*> memory;
  try {
    if (has_memory) {
      OverlapBuffer::Group& of_group = buffer.groups[group];
      while (of_group.memory.size() < static_cast<size_t>(spec.num_ranks)) {
        of_group.memory.emplace_back(new char[spec.rank_bytes]);  // touched when written
      }
      for (const auto& rank : of_group.memory) memory.push_back(rank.get());
    }
    *lease = std::make_shared<OverlapBufferLease>(id, group, std::move(memory));
  } catch (const std::exception&) {
    return Status::Internal(op, ": no memory for buffer ", id, ": ", spec.num_ranks, " ranks of ",
                            spec.rank_bytes, " bytes. Create it with a smaller buffer_shape.");
  }
  buffer.num_groups = static_cast<int64_t>(buffer.groups.size());
  ++buffer.num_in_use;
  ++buffer.num_calls;
  return Status::Ok();
}

void OverlapBufferLease::Enter(std::function<void()> begin) {
  {
    OverlapBuffers& all = OverlapBuffers::Get();
    std::lock_guard<std::mutex> lock(all.mutex_);
    OverlapBuffer::Group& group = all.buffers_.at(id_).groups.at(group_);
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
    OverlapBuffer& buffer = all.buffers_.at(id_);
    --buffer.num_in_use;
    if (entered_) {
      OverlapBuffer::Group& group = buffer.groups.at(group_);
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
      op, is_gone ? ": buffer " : ": there is no buffer ", id,
      is_gone ? " has been destroyed. " : ". ",
      "Create it with create_comm_overlap_buffer, in every process that runs the program.");
}

}  // namespace cpd
