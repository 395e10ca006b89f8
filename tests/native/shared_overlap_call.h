// Overlapped GEMMs between the processes of a job.
#pragma once

#include <utility>

#include "gemm/plan_overlap.h"
#include "job.h"
#include "overlap_call.h"

namespace cpd::shared_overlap {

using Processes = std::vector<int>;  // of each rank; never freed

constexpr int64_t kFewBytes = 16 << 20;  // of a segment: sanitizers have few addresses

// Far longer than an immediate notification takes: the test fails if a rank waits this long.
constexpr milliseconds kLong = std::chrono::hours(24);

inline Exchange MakeExchange(int64_t run_id, const Processes& processes, const OverlapProblem& call,
                             milliseconds deadline, GemmFunction gemm, int64_t buffer = 0) {
  OverlapProblem problem = call;
  problem.ranks.clear();
  const auto num_ranks = static_cast<int>(processes.size());
  Exchange exchange{"test", {run_id, 0, 0}, num_ranks, deadline, {}};
  exchange.processes = &processes;
  exchange.signature = "a product";
  exchange.planner = [=](const auto& ranks, WorkList* work) {
    return PlanOverlap(exchange, problem, buffer, gemm, ranks, work);
  };
  exchange.reader = [problem](std::string_view) {
    RankMemory memory;
    memory.is_elsewhere = true;
    return std::make_unique<OverlapContribution>(problem, memory);
  };
  return exchange;
}

inline std::vector<std::future<Status>> JoinAll(Job& job, const Exchange& exchange,
                                                const Call& call) {
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    ranks.push_back(
        JoinIn(job, exchange, rank,
               std::make_unique<OverlapContribution>(call.problem(), call.problem().ranks[rank])));
  }
  return ranks;
}

}  // namespace cpd::shared_overlap
