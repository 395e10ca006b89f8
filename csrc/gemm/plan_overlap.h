// Turns the contributions to one overlapped GEMM, and its buffer, into a schedule that runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "transport/transport.h"

namespace cpd {

// Gives `problem` the configuration of a registered buffer if the two match. `op` begins every
// message.
Status ConfigureByBuffer(const std::string& op, int64_t buffer_id, OverlapProblem* problem);

// Contributions are `OverlapContribution`s; `problem` has no memory yet. With a nonzero
// `buffer_id`, the registered buffer is in use until the work is over. Within one process its
// memory holds the chunks, and calls take turns. Between processes each call uses memory of the
// segments, since two processes could take turns in different orders.
Status PlanOverlap(const Exchange& exchange, OverlapProblem problem, int64_t buffer_id,
                   GemmFunction gemm,
                   const std::vector<std::unique_ptr<Contribution>>& contributions, WorkList* work);

}  // namespace cpd
