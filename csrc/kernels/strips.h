// How the host cuts the rows of a call into pieces, each of which a block moves at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "kernels/call.h"
#include "kernels/copy.h"

namespace cpd::kernels {

// Pieces of about 100 kB, and several per block if there is enough data. Each array's share is a
// whole number of a block's steps if a piece can hold so many rows.
inline int64_t RowsPerPiece(const Call& call, const Part& part, int num_blocks) {
  int64_t row_bytes = 0, in_steps = 1;
  for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
    const int64_t bytes = call.arrays[a].in_row_bytes;
    row_bytes += bytes;
    in_steps = std::lcm(in_steps, kStepBytes / std::gcd(kStepBytes, bytes));
  }
  const int64_t rows = std::max(part.num_tokens, part.capacity);
  const int64_t bytes =
      std::clamp<int64_t>(rows * row_bytes / (4 * num_blocks), 32 << 10, 128 << 10);
  const int64_t wanted = std::max<int64_t>(1, bytes / std::max<int64_t>(1, row_bytes));
  return wanted < in_steps ? wanted : wanted - wanted % in_steps;
}

}  // namespace cpd::kernels
