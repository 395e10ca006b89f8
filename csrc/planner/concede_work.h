// A construction of placements for limits that cannot be kept at the wanted balance.
#pragma once

#include <vector>

#include "planner/placement.h"

namespace cpd {

// Ranks with documents that break a limit get more work, as little as was found to be enough; all
// others keep their share.
RankPieces ConcedeWork(const PlacementProblem& problem, const std::vector<Piece>& items);

}  // namespace cpd
