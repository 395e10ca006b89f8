// A construction of placements: closes one rank after another, the longest remaining document
// first.
#pragma once

#include <vector>

#include "planner/placement.h"

namespace cpd {

// A number of thousandths of some work.
inline int64_t Scaled(int64_t work, int64_t permille) {
  __extension__ typedef __int128 Wide;
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
  int64_t slice_gain = 50;      // tokens that a slice, or a reserved document, must save
  int64_t dense_percent = 0;    // documents above this part of the limit come first; 0: off
  uint64_t seed = 0;            // varies `slice_gain` from rank to rank; 0: does not vary it
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

}  // namespace cpd
