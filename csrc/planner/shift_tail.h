// Brings a rank with too much work below the limit by a cut.
#pragma once

#include <cstdint>

#include "planner/rank_loads.h"

namespace cpd {

// Swaps the tail of a piece of `heavy` for the same number of tokens from the head of a piece of
// another rank, or of padding: fewest keys per unit of removed work. Returns the other rank, or -1
// if nothing helps.
int64_t ShiftTail(const PlacementProblem& problem, int64_t heavy, RankLoads* loads);

}  // namespace cpd
