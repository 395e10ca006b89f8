// A construction of placements that reaches the work limit, whatever it costs in keys.
#pragma once

#include <vector>

#include "planner/placement.h"

namespace cpd {

// The slowest ranks come first. Each gets as many of the densest remaining tokens (with the most
// work per token) as its limit allows, with the least dense ones, padding first; documents are cut
// anywhere. So no rank has less work than its share of what is left, except by the work of one
// token, and the last rank keeps its limit if the tolerance is worth more than these tokens.
RankPieces MixDensities(const PlacementProblem& problem, const std::vector<Piece>& items);

}  // namespace cpd
