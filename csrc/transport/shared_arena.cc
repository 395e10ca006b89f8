// The memory of one process that the other processes of its job read: ranges of one segment.
#include "transport/shared_arena.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace cpd {
namespace {

constexpr int64_t kGranuleBytes = 1 << 20;  // of memory committed at a time
// If nothing is in use, memory beyond this is returned to the system.
constexpr int64_t kKeptBytes = int64_t{1} << 30;

}  // namespace

SharedArena::SharedArena(int fd, char* base, int64_t num_bytes)
    : fd_(fd),
      base_(base),
      num_bytes_(num_bytes),
      free_{{0, num_bytes}},
      committed_((num_bytes + kGranuleBytes - 1) / kGranuleBytes, false) {}

int64_t SharedArena::Allocate(int64_t num_bytes) {
  if (num_bytes > num_bytes_) return -1;
  const int64_t size = PageAligned(std::max(num_bytes, int64_t{1}));
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) continue;
    const int64_t offset = it->first, left = it->second - size;
    free_.erase(it);
    if (left > 0) free_.emplace(offset + size, left);
    return offset;
  }
  return -1;
}

void SharedArena::Free(int64_t offset, int64_t num_bytes) {
  int64_t size = PageAligned(std::max(num_bytes, int64_t{1}));
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      free_.erase(previous);
    }
  }
  free_.emplace(offset, size);
  if (size == num_bytes_ && num_committed_ * kGranuleBytes > kKeptBytes) ReturnMemory();
}

Status SharedArena::Commit(int64_t offset, int64_t num_bytes) {
  if (num_bytes <= 0) return Status::Ok();
  const int64_t end = (offset + num_bytes - 1) / kGranuleBytes + 1;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t granule = offset / kGranuleBytes; granule < end; ++granule) {
    if (committed_[granule]) continue;
    const int64_t begin = granule * kGranuleBytes;
    const int64_t bytes = std::min(kGranuleBytes, num_bytes_ - begin);
    int failed;
    do {
      failed = fallocate(fd_, 0, begin, bytes);
    } while (failed != 0 && errno == EINTR);
    if (failed != 0) {
      return Status::Internal(
          "no shared memory for ", num_bytes, " bytes that other processes read (",
          std::strerror(errno), "); this process shares ", num_committed_ * kGranuleBytes,
          " bytes. Send less in one call, run fewer processes, or give the machine (or its "
          "container) more memory.");
    }
    committed_[granule] = true;
    ++num_committed_;
  }
  return Status::Ok();
}

void SharedArena::ReturnMemory() {
  int64_t kept = 0;
  for (size_t granule = 0; granule < committed_.size(); ++granule) {
    if (!committed_[granule]) continue;
    if ((kept + 1) * kGranuleBytes <= kKeptBytes) {
      ++kept;
      continue;
    }
    const int64_t begin = static_cast<int64_t>(granule) * kGranuleBytes;
    const int64_t bytes = std::min(kGranuleBytes, num_bytes_ - begin);
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes) != 0) continue;
    committed_[granule] = false;
    --num_committed_;
  }
}

}  // namespace cpd
