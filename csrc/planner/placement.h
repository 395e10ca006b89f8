// Places the tokens of packed documents on ranks: equal tokens, nearly equal work, few moved keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "planner/pair_count.h"
#include "planner/query_table.h"

namespace cpd {

// Tokens [start, end) of a document.
struct Piece {
  int64_t start = 0;
  int64_t end = 0;
  int32_t document = 0;

  int64_t num_tokens() const { return end - start; }
};

struct PlacementProblem {
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;

  std::vector<int64_t> lengths;  // tokens of each document
  int32_t num_ranks = 1;
  int64_t tokens_per_rank =
      0;              // all ranks together hold at least the documents; the rest is padding
  PairSum pairs;      // of all layers
  SharedTable table;  // in place of `pairs`, of all layers too
  int64_t tolerance_ppm = 10'000;  // allowed excess of a rank over its share of the work
  std::vector<int64_t> speeds;  // relative speed of each rank, to which its share is proportional
  int32_t ranks_per_node = 1;   // consecutive ranks; all ranks, or 1, for no nodes
  int64_t max_received = kNoLimit;  // rows that a rank receives, its own included
  int64_t block = 1;                // documents are cut at multiples of this, if possible

  std::vector<int64_t> limits;  // work of each rank; see `SetLimits`

  int64_t Work(const Piece& piece) const {
    const int32_t document = piece.document;
    return table ? table->Pairs(document, piece.start, piece.end)
                 : pairs(piece.start, piece.end, lengths[document]);
  }
  // The keys that queries from `start` on, and up to `end`, see.
  int64_t FirstKey(int32_t document, int64_t start) const {
    return table ? table->FirstKey(document, start) : pairs.FirstKey(start);
  }
  int64_t LastKey(int32_t document, int64_t end) const {
    return table ? table->LastKey(document, end) : pairs.LastKey(end, lengths[document]);
  }
  // Rows that a rank receives for this piece alone, its own included.
  int64_t Rows(const Piece& piece) const {
    const int64_t first = FirstKey(piece.document, piece.start);
    return std::max<int64_t>(0, LastKey(piece.document, piece.end) - first);
  }
  // No query attends to later tokens, for certain.
  bool IsCausal() const { return !table && pairs.IsCausal(); }
  // Positions of a document between which the pairs of a query only grow, stay or fall, if known.
  std::vector<int64_t> Turns(int32_t document) const {
    return table ? std::vector<int64_t>() : pairs.Turns(lengths[document]);
  }
  bool HasCapacity() const { return max_received < kNoLimit; }
  bool HasNodes() const { return ranks_per_node > 1 && ranks_per_node < num_ranks; }
};

// The largest work of each rank: its share of all work, plus the tolerance; rounded down.
std::vector<int64_t> WorkLimits(int64_t total, const std::vector<int64_t>& speeds,
                                int64_t tolerance_ppm);

// Sets `limits`, and `speeds` if it is empty.
void SetLimits(PlacementProblem* problem);

// The pieces of each rank; missing tokens of a rank are padding.
using RankPieces = std::vector<std::vector<Piece>>;

// All pieces once, sorted by document and start; adjacent ones are joined.
void SortAndJoin(std::vector<Piece>* pieces);

// The rows that a rank with these pieces receives, its own included. Sorts and joins them.
int64_t ReceivedRows(const PlacementProblem& problem, std::vector<Piece>* pieces);

// The received rows that are not the rank's own. Sorts and joins the pieces.
int64_t ReceivedKeys(const PlacementProblem& problem, std::vector<Piece>* pieces);

// Keys that one rank sends to another.
struct Traffic {
  int32_t source = 0;
  int32_t target = 0;
  int64_t keys = 0;
};
std::vector<Traffic> ListTraffic(const PlacementProblem& problem, const RankPieces& ranks);

// A rank receives this many rows more than it may, most of them of this document.
struct Overflow {
  int32_t document = 0;
  int64_t rows = 0;
};

// The pieces of each rank are sorted and joined.
std::vector<Overflow> ListOverflows(const PlacementProblem& problem, const RankPieces& ranks);

// The cost of an assignment, the most important part first. A rank receives a key only once.
struct PlacementCost {
  int64_t overflow = 0;       // rows by which ranks exceed their capacity, over all ranks
  int64_t excess = 0;         // excess of work of the most loaded rank over its limit
  int64_t between_nodes = 0;  // keys that move to another node
  int64_t received_keys = 0;  // over all ranks

  bool operator<(const PlacementCost& other) const {
    if (overflow != other.overflow) return overflow < other.overflow;
    if (excess != other.excess) return excess < other.excess;
    if (between_nodes != other.between_nodes) return between_nodes < other.between_nodes;
    return received_keys < other.received_keys;
  }
  bool operator==(const PlacementCost& other) const { return !(*this < other) && !(other < *this); }
};
PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks);

// The best of several constructions, after repair. Uses integers only and a fixed number of steps:
// equal problems give equal results on every machine. If the capacity or a limit of work cannot be
// kept, the result exceeds it by as little as was found.
RankPieces PlaceDocuments(PlacementProblem problem);

}  // namespace cpd
