// The memory of one process that the other processes of its job read: ranges of one segment.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// Address space costs nothing. Memory is committed where rows are written, and kept for the next
// exchange. All functions are thread-safe.
class SharedArena {
 public:
  static constexpr int64_t kPageBytes = 4096;
  static int64_t PageAligned(int64_t bytes) {
    return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  // `fd` is a segment of `num_bytes`, mapped at `base` by the caller.
  SharedArena(int fd, char* base, int64_t num_bytes);

  // The lowest free range, aligned to pages; -1 if there is none.
  int64_t Allocate(int64_t num_bytes);
  // Frees a range from `Allocate` that is no longer read.
  void Free(int64_t offset, int64_t num_bytes);

  // Commits memory for a range before it is written: a write without memory would kill the process.
  Status Commit(int64_t offset, int64_t num_bytes);

  char* at(int64_t offset) const { return base_ + offset; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void ReturnMemory();  // with the lock held

  const int fd_;
  char* const base_;
  const int64_t num_bytes_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes; no two are adjacent
  std::vector<bool> committed_;      // by granule
  int64_t num_committed_ = 0;
};

}  // namespace cpd
