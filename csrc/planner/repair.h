// Brings ranks with too much work below the limit by exchanging whole documents.
#pragma once

#include "planner/placement.h"

namespace cpd {

// Exchanges equal numbers of tokens between a rank above the limit and one below it, with as few
// cuts as possible, until all ranks keep the limit or nothing helps. Takes a bounded number of
// steps.
void RepairBalance(const PlacementProblem& problem, RankPieces* ranks);

}  // namespace cpd
