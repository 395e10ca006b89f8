// The steps of a plan: ranks with too much work give queries away, and so do ranks without room.
#pragma once

#include <cstdint>

#include "planner/query_shares.h"

namespace cpd {

// A generator of pseudorandom numbers (xorshift64), the same on every machine.
class Random {
 public:
  int64_t Below(int64_t bound) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<int64_t>((state_ >> 16) % static_cast<uint64_t>(bound));
  }
  // A number within `per_mille` of 1000.
  int64_t Around1000(int64_t per_mille) {
    return per_mille == 0 ? 1000 : 1000 - per_mille + Below(2 * per_mille + 1);
  }

 private:
  uint64_t state_ = 88172645463325252;
};

struct Filling {
  int64_t min_queries = 1;      // that are split from a document, if possible
  int64_t block = 1;            // of which all cuts are multiples
  int64_t noise_per_mille = 0;  // of comparisons, so that repeated calls differ
  // A rank that can be filled from the end of a share takes the longest such share. If a document
  // must be given to many ranks, each receives the keys up to its last query. Ranks with the most
  // room then take the last queries, so that few ranks receive all keys.
  bool longest_first = false;
  bool inside_nodes = false;  // Ranks take from ranks of their node only.
};

// Returns the number of candidates considered. Stops if no rank is above the limit, or if nothing
// fits.
int64_t FillRanks(const Filling& filling, Random* random, QueryShares* shares);

// Gives queries away from ranks that receive more queries or keys than they have room for. Stops if
// no rank exceeds its capacities, or if no rank with room can help. Both return the number of
// candidates considered.
int64_t KeepCapacities(QueryShares* shares);

// Gives queries with little work away from a rank, until it has room for so many rows or no other
// rank can take more.
int64_t MakeRoom(int32_t rank, int64_t rows, QueryShares* shares);

}  // namespace cpd
