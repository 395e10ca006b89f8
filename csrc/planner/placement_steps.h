// The steps of a placement: constructions, repair, and the arrangement of ranks in nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/placement.h"

namespace cpd {

// A number of thousandths of some work.
inline int64_t Scaled(int64_t work, int64_t permille) {
  return static_cast<int64_t>(static_cast<Wide>(work) * permille / 1000);
}

// What a document may cost its ranks where the capacity conflicts with balance.
struct Concession {
  int64_t work_permille = 1000;    // of the work limit, for a rank that closes with a part of it
  int64_t needed_permille = 1000;  // the most that a rank got
};

// The parameters of a construction.
struct Closing {
  int64_t reserve_percent = 0;  // short documents reserved to fill ranks exactly, per 100 ranks
  int64_t dense_percent = 0;    // documents above this part of the limit come first; 0: off
  uint64_t seed = 0;            // varies what a slice must save from rank to rank; 0: does not
};

// The fastest ranks come first. The next rank takes the largest tail of the longest remaining
// document that the work limit allows, beside the shortest documents. So the heads, whose keys must
// be received, are as short as possible. Once the longest remaining document fits a rank whole,
// ranks are filled with whole documents up to the mean of the remaining work. `sorted` are whole
// documents in the order of `ItemPool`.
//
// With `concessions`, one for each document of the problem, a rank for which no part of the longest
// document keeps its limits gets as little more work as possible; `needed_permille` becomes that.
RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& items,
                      const Closing& closing, std::vector<Concession>* concessions = nullptr);

// The slowest ranks come first. Each gets as many of the densest remaining tokens (with the most
// work per token) as its limit allows, with the least dense ones, padding first; documents are cut
// anywhere. So no rank has less work than its share of what is left, except by the work of one
// token, and the last rank keeps its limit if the tolerance is worth more than these tokens.
RankPieces MixDensities(const PlacementProblem& problem, const std::vector<Piece>& items);

// In a batch of few tokens, where the work of one counts: swaps single tokens of the rank furthest
// above its limit for those of others, as long as that helps.
void SwapTokens(const PlacementProblem& problem, RankPieces* ranks);

// Ranks with documents that break a limit get more work, as little as was found to be enough; all
// others keep their share.
RankPieces ConcedeWork(const PlacementProblem& problem, const std::vector<Piece>& items);

// Exchanges equal numbers of tokens between a rank above the limit and one below it, with as few
// cuts as possible, until all ranks keep the limit or nothing helps. Takes a bounded number of
// steps.
void RepairBalance(const PlacementProblem& problem, RankPieces* ranks);

// Exchanges the pieces of whole ranks of equal speed, so that fewer keys move between nodes.
void ArrangeInNodes(const PlacementProblem& problem, RankPieces* ranks);

// The problem in which each node is one rank.
PlacementProblem NodesOf(const PlacementProblem& problem);

// The problem of the ranks of one node, for some pieces of all documents.
PlacementProblem RanksOf(const PlacementProblem& problem, int32_t node);

}  // namespace cpd
