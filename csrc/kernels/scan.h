// Prefix sums over a block's items, in order.
#pragma once

#include "kernels/block.h"

namespace cpd::kernels {

// Each of some threads or blocks owns the items [begin, end) of n.
struct Share {
  int64_t begin, end;
};

CPD_DEVICE Share ShareOf(int index, int num, int64_t n) {
  const int64_t each = (n + num - 1) / num;
  const int64_t begin = index * each < n ? index * each : n;
  return {begin, begin + each < n ? begin + each : n};
}

CPD_DEVICE Share ShareOf(const Block& block, int64_t n) {
  return ShareOf(block.thread, block.num_threads, n);
}

// The sum of `mine` over the threads before this one; `*total` becomes the sum over all threads.
// `scratch` holds 2 * kMaxThreads numbers and is free again after the next Sync.
CPD_DEVICE int64_t SumBefore(const Block& block, int64_t mine, int64_t* scratch, int64_t* total) {
  int64_t* from = scratch;
  int64_t* to = scratch + kMaxThreads;
  from[block.thread] = mine;
  block.Sync();
  for (int step = 1; step < block.num_threads; step *= 2) {
    to[block.thread] = from[block.thread] + (block.thread >= step ? from[block.thread - step] : 0);
    block.Sync();
    int64_t* other = from;
    from = to;
    to = other;
  }
  *total = from[block.num_threads - 1];
  const int64_t before = from[block.thread] - mine;
  block.Sync();
  return before;
}

}  // namespace cpd::kernels
