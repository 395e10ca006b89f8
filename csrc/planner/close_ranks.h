// A construction of placements: closes one rank after another, the longest remaining document
// first.
#pragma once

#include <vector>

#include "planner/placement.h"

namespace cpd {

// The parameters of a construction.
struct Closing {
  int64_t reserve_percent = 0;  // short documents reserved to fill ranks exactly, per 100 ranks
  int64_t slice_gain = 50;      // tokens that a slice, or a reserved document, must save
  int64_t dense_percent = 0;    // documents above this part of the limit come first; 0: off
  int64_t limit_percent = 100;  // of the work limit; more than 100 keeps other limits more easily
  bool longest_first = false;   // whole documents fill a rank up to its limit, not to the mean
  uint64_t seed = 0;            // varies `slice_gain` from rank to rank; 0: does not vary it
};

// The fastest ranks come first. The next rank takes the largest tail of the longest remaining
// document that the work limit allows, beside the shortest documents. So the heads, whose keys must
// be received, are as short as possible. Once the longest remaining document fits a rank whole,
// ranks are filled with whole documents up to the mean of the remaining work. `sorted` are whole
// documents in the order of `ItemPool`.
RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& items,
                      const Closing& closing);

}  // namespace cpd
