// How many blocks move the rows of a call, and into which strips the host cuts these for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "kernels/call.h"
#include "kernels/copy.h"

namespace cpd::kernels {

// Multiprocessors of an exchange between devices, if no number is asked for. On one H200, so many
// push rows at 0.8 TB/s and take them at 1.0 TB/s, more than NVLink carries. A GEMM beside them
// takes 4 to 11 % longer; beside an exchange on all of them, 12 to 16 %.
constexpr int kSmsBetweenDevices = 64;

// Blocks of an exchange: one on each of `num_comm_sm` multiprocessors, or the `num_resident` that
// fill the device, if it holds all ranks or all are asked for.
inline int NumMoveBlocks(int64_t num_comm_sm, int num_resident, bool on_one_device) {
  if (num_comm_sm <= 0 && !on_one_device) num_comm_sm = kSmsBetweenDevices;
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
