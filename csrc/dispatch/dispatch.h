// Copy planning: from what the ranks of one dispatch or combine bring to the copies that make it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/sum_rows.h"
#include "transport/transport.h"

namespace cpd {

// One array on one rank: rows of equal size, one after another.
struct RowArray {
  char* data = nullptr;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
};

// What one rank brings: its arrays and its slice of the forward metadata (which both operations
// take: combine is the adjoint of dispatch). Pointers stay valid until the exchange is over.
struct DispatchContribution final : Contribution {
  std::vector<RowArray> tokens;  // rows in the owner's layout: read by dispatch, written by combine
  std::vector<RowArray>
      buffers;                  // rows of the receive buffer: written by dispatch, read by combine
  std::vector<SumTypes> types;  // per array; combine only

  int64_t num_slots = 0;                 // S
  int64_t num_replicas = 0;              // C
  const int32_t* dst_rank = nullptr;     // [S, C], -1 = not sent
  const uint32_t* dst_offset = nullptr;  // [S, C]
  const uint32_t* seq_len = nullptr;     // [S]
  const uint32_t* src_offset = nullptr;  // [S]
  const uint32_t* num_recv = nullptr;    // [W + 1], tokens from each rank and their sum
};

// Both check the contributions of all ranks together and refuse before anything moves.
// `op` begins every message.

// buffers[d][dst_offset + i] = tokens[s][src_offset + i]; rows that nobody writes become zero.
Status PlanDispatch(const std::string& op, const std::vector<std::unique_ptr<Contribution>>& ranks,
                    WorkList* work);

// tokens[s][src_offset + i] = sum over slots, then replicas, of buffers[d][dst_offset + i]; in that
// order, so the result is bitwise repeatable. Rows that nobody names become zero.
Status PlanCombine(const std::string& op, const std::vector<std::unique_ptr<Contribution>>& ranks,
                   WorkList* work);

}  // namespace cpd
