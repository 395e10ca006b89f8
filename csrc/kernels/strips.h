// How many blocks move the rows of a call, and into which strips the host cuts these for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "kernels/call.h"
#include "kernels/copy.h"

namespace cpd::kernels {

// The blocks that move rows, of all local ranks, on a device that runs `num_resident` at once.
// Blocks go to multiprocessors that are free, so `num_comm_sm` blocks never use more than these.
// Two on each where all of them are used.
inline int NumMoveBlocks(int64_t num_comm_sm, int num_resident) {
  const bool are_all = num_comm_sm <= 0 || num_comm_sm >= num_resident / kMoveBlocks;
  return are_all ? num_resident : static_cast<int>(num_comm_sm);
}

// Strips of about 100 kB, and several per block if there is enough data; `num_blocks` are those of
// all local ranks. Each array's share is a whole number of a block's steps if a strip can hold so
// many rows.
inline int64_t RowsPerStrip(const Call& call, const OperandGroup& group, int num_blocks) {
  int64_t row_bytes = 0, in_steps = 1;
  for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
    const int64_t bytes = call.arrays[a].in_row_bytes;
    row_bytes += bytes;
    in_steps = std::lcm(in_steps, kStepBytes / std::gcd(kStepBytes, bytes));
  }
  const int64_t rows = std::max(group.num_tokens, group.capacity);
  const int64_t blocks_of_rank = std::max(1, num_blocks / call.num_local);
  const int64_t bytes =
      std::clamp<int64_t>(rows * row_bytes / (4 * blocks_of_rank), 32 << 10, 128 << 10);
  const int64_t wanted = std::max<int64_t>(1, bytes / std::max<int64_t>(1, row_bytes));
  return wanted < in_steps ? wanted : wanted - wanted % in_steps;
}

}  // namespace cpd::kernels
