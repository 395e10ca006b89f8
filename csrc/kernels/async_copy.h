// Copies into a block's memory that run beside its arithmetic, in groups.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_pipeline.h>
#else
#include <deque>
#include <functional>
#include <vector>
#endif

#include "kernels/block.h"

namespace cpd::kernels {

class AsyncCopies {
 public:
  // kBytes: 4, 8 or 16. Writes zeros if there is nothing to copy; `from` is not read then.
  template <int kBytes>
  CPD_DEVICE void Copy(void* to, const void* from, bool is_there) {
#ifdef __CUDACC__
    __pipeline_memcpy_async(to, from, kBytes, is_there ? 0 : kBytes);
#else
    const auto copy = [=] {
      std::memset(to, 0, kBytes);
      if (is_there) std::memcpy(to, from, kBytes);
    };
    is_early_ ? copy() : group_.push_back(copy);
#endif
  }

  // Ends a group, which may be empty.
  CPD_DEVICE void Commit() {
#ifdef __CUDACC__
    __pipeline_commit();
#else
    groups_.push_back(std::move(group_));
    group_.clear();
#endif
  }

  // Waits for all groups but the last `left`, of this thread; a Sync must follow.
  CPD_DEVICE void Wait(int left) {
#ifdef __CUDACC__
    __pipeline_wait_prior(left);
#else
    for (; groups_.size() > static_cast<size_t>(left); groups_.pop_front()) {
      for (const auto& copy : groups_.front()) copy();
    }
#endif
  }

#ifndef __CUDACC__
  // A copy runs as early as a GPU may run it, or as late.
  explicit AsyncCopies(bool is_early) : is_early_(is_early) {}

 private:
  bool is_early_;
  std::vector<std::function<void()>> group_;
  std::deque<std::vector<std::function<void()>>> groups_;
#endif
};

}  // namespace cpd::kernels
