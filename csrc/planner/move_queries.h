// Plans which rank computes which queries of packed documents: nearly equal work, few moved bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/placement.h"

namespace cpd {

// Rank r holds columns [r * columns_per_rank, (r + 1) * columns_per_rank) of every batch row.
struct QueryProblem {
  static constexpr int64_t kNoLimit = PlacementProblem::kNoLimit;

  std::vector<int64_t> lengths;  // tokens of each document
  std::vector<int64_t> columns;  // column of its batch row at which each document starts
  int32_t num_ranks = 1;
  int64_t columns_per_rank = 1;
  PairCount pairs;
  SharedTable table;               // in place of `pairs`
  int64_t tolerance_ppm = 10'000;  // allowed excess of a rank over its share of the work
  std::vector<int64_t> speeds;  // relative speed of each rank, to which its share is proportional
  int32_t ranks_per_node = 1;   // consecutive ranks; all ranks, or 1, for no nodes
  // Bytes of a query and its output, and of a key and its value, in one unit.
  int64_t query_cost = 1;
  int64_t key_cost = 1;
  int64_t max_queries = kNoLimit;  // that a rank computes
  int64_t max_keys = kNoLimit;     // that a rank receives, its own included
  // If possible, documents are cut at multiples of this, and into pieces of so many queries.
  int64_t block = 1;
  int64_t wanted_piece = 1;

  // Pairs of the queries [start, end) of a document, and the keys that they see.
  int64_t Pairs(int32_t document, int64_t start, int64_t end) const {
    return table ? table->Pairs(document, start, end) : pairs(start, end, lengths[document]);
  }
  int64_t FirstKey(int32_t document, int64_t start) const {
    return table ? table->FirstKey(document, start) : pairs.FirstKey(start);
  }
  int64_t LastKey(int32_t document, int64_t end) const {
    return table ? table->LastKey(document, end) : pairs.LastKey(end, lengths[document]);
  }
  // Causal attention to the whole document.
  bool IsUnlimited() const { return !table && pairs.IsUnlimited(); }

  bool HasNodes() const { return ranks_per_node > 1 && ranks_per_node < num_ranks; }
  bool HasCapacities() const { return max_queries < kNoLimit || max_keys < kNoLimit; }
};

// The pieces that each rank computes. A rank receives each key that its queries need once. Uses
// integers only and a bounded number of steps: equal problems give equal results on every machine.
RankPieces MoveQueries(QueryProblem problem);

}  // namespace cpd
