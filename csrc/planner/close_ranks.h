// One way to place documents: close one rank after the other, the longest remains first.
#pragma once

#include <vector>

#include "planner/placement.h"

namespace cpd {

// What tells one construction from another.
struct Closing {
  int64_t reserve_percent = 0;  // short documents kept back to fill ranks exactly, per 100 ranks
  int64_t slice_gain = 50;      // tokens by which a slice, or one kept back, needs to be better
  int64_t dense_percent = 0;  // documents with more of the limit, and no more, come first; 0: none
  uint64_t seed = 0;          // varies `slice_gain` from rank to rank; 0: does not
};

// The largest tail of the longest remaining document goes to the next rank, beside the shortest
// documents: as large as the limit on work allows. So the starts of the tails, which are the keys
// that have to be received, are as small as possible. When the longest remaining document fits a
// rank whole, ranks are filled with whole documents up to the mean work of what is left.
// `sorted` are whole documents in the order of `ItemPool`.
RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& sorted,
                      const Closing& closing);

}  // namespace cpd
