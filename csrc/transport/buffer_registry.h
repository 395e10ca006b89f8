// The common part of the registries of buffers: ids, counts of uses, and errors.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cpd {

struct BufferUsage {
  int64_t num_created = 0;  // references that have not been destroyed
  int64_t num_in_use = 0;   // calls in flight
  int64_t num_calls = 0;    // so far
};

// `Entry` is a BufferUsage with the description of a buffer; `Buffer` is an Entry with the state
// that only the registry sees. All functions are thread-safe. `op` begins every message.
template <typename Entry, typename Buffer = Entry>
class BufferRegistry {
 public:
  // Releases one reference. Refused for the last one while a call uses the buffer.
  Status Destroy(const std::string& op, int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(id);
    if (found == buffers_.end()) return NoSuchBuffer(op, id);
    BufferUsage& usage = found->second;
    if (usage.num_created > 1) {
      --usage.num_created;
      return Status::Ok();
    }
    if (usage.num_in_use > 0) {
      return Status::Invalid(op, ": buffer ", id, " is in use by ", Calls(usage.num_in_use),
                             counts_ranks_ ? " in flight, one per rank. Wait for their results"
                                           : " in flight. Wait for their results",
                             ", for example with jax.block_until_ready, then destroy it.");
    }
    buffers_.erase(found);
    Destroyed(id);
    return Status::Ok();
  }

  // Destroys every buffer, or none if one of them is in use.
  Status DestroyAll(const std::string& op) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string busy;
    for (const auto& [id, buffer] : buffers_) {
      if (buffer.num_in_use == 0) continue;
      busy +=
          (busy.empty() ? "" : ", ") + std::to_string(id) + " (" + Calls(buffer.num_in_use) + ")";
    }
    if (!busy.empty()) {
      return Status::Invalid(op,
                             counts_ranks_ ? ": calls in flight, counted per rank, use buffers "
                                           : ": calls in flight use buffers ",
                             busy,
                             "; none has been destroyed. Wait for their results, for example with "
                             "jax.block_until_ready, then destroy all.");
    }
    for (const auto& [id, buffer] : buffers_) Destroyed(id);
    buffers_.clear();
    return Status::Ok();
  }

  Status Find(const std::string& op, int64_t id, Entry* entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(id);
    if (found == buffers_.end()) return NoSuchBuffer(op, id);
    *entry = found->second;
    return Status::Ok();
  }

  std::vector<std::pair<int64_t, Entry>> List() {  // in the order of ids
    std::lock_guard<std::mutex> lock(mutex_);
    return {buffers_.begin(), buffers_.end()};
  }

 protected:
  // `counts_ranks`: a call is counted once per rank.
  explicit BufferRegistry(bool counts_ranks) : counts_ranks_(counts_ranks) {}
  ~BufferRegistry() = default;

  // Both are called with the lock held.
  virtual Status NoSuchBuffer(const std::string& op, int64_t id) const = 0;
  virtual void Destroyed(int64_t /*id*/) {}

  std::mutex mutex_;
  std::map<int64_t, Buffer> buffers_;

 private:
  static std::string Calls(int64_t count) {
    return std::to_string(count) + (count == 1 ? " call" : " calls");
  }

  const bool counts_ranks_;
};

}  // namespace cpd
