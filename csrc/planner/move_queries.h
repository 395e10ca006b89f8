// Plans which rank computes which queries of packed documents: nearly equal work, few moved bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/problem.h"

namespace cpd {

// Rank r holds columns [r * columns_per_rank, (r + 1) * columns_per_rank) of every batch row.
struct QueryProblem : PlannerProblem<PairCount> {
  std::vector<int64_t> columns;  // column of its batch row at which each document starts
  int64_t columns_per_rank = 1;
  // Bytes of a query and its output, and of a key and its value, in one unit.
  int64_t query_cost = 1;
  int64_t key_cost = 1;
  int64_t max_queries = kNoLimit;  // that a rank computes
  int64_t max_keys = kNoLimit;     // that a rank receives, its own included
  int64_t wanted_piece = 1;        // documents are cut into pieces of so many queries, if possible

  // Causal attention to the whole document.
  bool IsUnlimited() const { return !table && pairs.IsUnlimited(); }
  bool HasCapacities() const { return max_queries < kNoLimit || max_keys < kNoLimit; }
};

// The pieces that each rank computes. A rank receives each key that its queries need once. Uses
// integers only and a bounded number of steps: equal problems give equal results on every machine.
RankPieces MoveQueries(QueryProblem problem);

}  // namespace cpd
