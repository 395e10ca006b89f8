// From what the ranks of one overlapped GEMM bring to the schedule that runs, with its buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gemm/comm_overlap.h"
#include "transport/transport.h"

namespace cpd {

// What one rank brings. Pointers stay valid until the exchange is over.
struct OverlapContribution final : Contribution {
  RankMemory memory;
};

// `problem` is without memory. With a `buffer_id` other than 0 its configuration and memory are
// those of the registered buffer, whose turn is waited for; the call is refused if it does not fit.
Status PlanOverlap(const Exchange& exchange, OverlapProblem problem, int64_t buffer_id,
                   int num_threads, const std::vector<std::unique_ptr<Contribution>>& contributions,
                   WorkList* work);

}  // namespace cpd
