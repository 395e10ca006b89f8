// Plans which rank computes which queries of packed documents: nearly equal work, few moved bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/placement.h"

namespace cpd {

// Rank r holds columns [r * columns_per_rank, (r + 1) * columns_per_rank) of every batch row.
struct QueryProblem {
  std::vector<int64_t> lengths;  // tokens of each document
  std::vector<int64_t> columns;  // column of its batch row at which each document starts
  int32_t num_ranks = 1;
  int64_t columns_per_rank = 1;
  PairCount pairs;
  int64_t tolerance_ppm = 10'000;  // allowed excess of the most loaded rank over the mean work
  // Bytes of a query and its output, and of a key and its value, in one unit.
  int64_t query_cost = 1;
  int64_t key_cost = 1;
  int64_t min_queries = 1;  // that are split from a document
};

// The pieces that each rank computes. A rank receives each key that its queries need once. Uses
// integers only and a bounded number of steps: equal problems give equal results on every machine.
RankPieces MoveQueries(const QueryProblem& problem);

}  // namespace cpd
