// Gives queries away from ranks that receive more queries or keys than they have room for.
#pragma once

#include "planner/query_shares.h"

namespace cpd {

// Stops if no rank exceeds its capacities, or if no rank with room can help. Both return the number
// of candidates considered.
int64_t KeepCapacities(QueryShares* shares);

// Gives queries with little work away from a rank, until it has room for so many rows or no other
// rank can take more.
int64_t MakeRoom(int32_t rank, int64_t rows, QueryShares* shares);

}  // namespace cpd
