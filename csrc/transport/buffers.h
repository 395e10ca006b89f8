// The registry of dispatch buffers: limits under an id, and who is using them.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cpd {

struct BufferLimits {
  int64_t capacity;    // rows of the result, per rank
  int64_t row_bytes;   // of one row, over all arrays of one call
  int64_t num_groups;  // independent groups of ranks of one call
  std::chrono::milliseconds deadline;
};

struct BufferEntry {
  BufferLimits limits;
  int64_t num_in_use = 0;  // acquired and not yet released, by a rank each
  int64_t num_calls = 0;   // acquired so far
};

// All functions may be called from any thread. `op` begins every message. Ids count up from 1 and
// never come back: what is below the next id and not here has been destroyed.
class BufferRegistry {
 public:
  // The one registry of this process. Never destroyed: completions may release during exit().
  static BufferRegistry& Get();

  // Refuses limits that no call could have.
  Status Create(const std::string& op, const BufferLimits& limits, int64_t* id);

  // No limit shrinks: each becomes the larger of what it is and what is asked for.
  Status Grow(const std::string& op, int64_t id, int64_t capacity, int64_t row_bytes,
              int64_t num_groups);

  // Refused while the buffer is in use.
  Status Destroy(const std::string& op, int64_t id);

  // Destroys every buffer, or none if one of them is in use.
  Status DestroyAll(const std::string& op);

  Status Find(const std::string& op, int64_t id, BufferEntry* entry);

  std::vector<std::pair<int64_t, BufferEntry>> List();  // in the order of ids

  // One rank of one exchange enters. If it may, row_bytes grows to that of the call, and the
  // buffer is in use until Release, which is due exactly once. What is refused is not
  // counted. An id in use stays, so no rank of an exchange finds it destroyed after another did
  // not; Grow can come between two ranks, so a refusal has to fail the execution for all of them.
  Status Acquire(int64_t id, const std::string& op, int64_t group, int64_t num_rows,
                 int64_t row_bytes);
  void Release(int64_t id);

 private:
  Status NoSuchBuffer(const std::string& op, int64_t id) const;  // with the lock held

  std::mutex mutex_;
  std::map<int64_t, BufferEntry> entries_;
  int64_t next_id_ = 1;
};

}  // namespace cpd
