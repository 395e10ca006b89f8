// Brings ranks with too much work below the limit by exchanging whole documents.
#pragma once

#include "planner/placement.h"

namespace cpd {

// Exchanges documents between a rank above the limit and one below it, equally many tokens, as few
// cuts as possible, until all ranks keep the limit or nothing helps. A bounded number of steps.
void RepairBalance(const PlacementProblem& problem, RankPieces* ranks);

}  // namespace cpd
