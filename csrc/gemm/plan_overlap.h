// From what the ranks of one overlapped GEMM bring to the schedule that runs, with its buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "transport/transport.h"

namespace cpd {

// Gives `problem` the configuration of a registered buffer, if the call fits it. `op` begins every
// message.
Status ConfigureByBuffer(const std::string& op, int64_t buffer_id, OverlapProblem* problem);

// Contributions are `OverlapContribution`s; `problem` is without memory. With a `buffer_id` other
// than 0 the registered buffer is in use until the work is over. Between the ranks of one process
// its memory holds the chunks, and its turn is waited for; between processes each call takes
// memory of the segments, since two of them could have their turns in different orders.
Status PlanOverlap(const Exchange& exchange, OverlapProblem problem, int64_t buffer_id,
                   GemmFunction gemm,
                   const std::vector<std::unique_ptr<Contribution>>& contributions, WorkList* work);

}  // namespace cpd
