// Brings a rank with too much work below the limit by exchanging whole pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/rank_loads.h"

namespace cpd {

// One or two pieces of a rank.
struct Group {
  int64_t tokens = 0;
  int64_t work = 0;
  int64_t rows = 0;  // that its rank receives for it
  int first = -1;
  int second = -1;
  int cut = -1;  // the piece whose head moves with it: the longest other one that starts a document
};

class PieceExchange {
 public:
  PieceExchange(const PlacementProblem& problem, RankLoads* loads);

  // Whether more exchanges may be considered.
  bool IsOpen() const { return num_left_ > 0; }
  // Exchanges equal numbers of tokens between `heavy` and a rank below the limit, with at most one
  // cut: fewest keys per unit of removed work. Returns whether that was possible.
  bool Apply(int64_t heavy);
  // The pieces of the rank have changed.
  void Forget(int64_t rank) { groups_[rank].clear(); }

 private:
  struct Exchange {
    Price price;
    int64_t other = -1;
    Group out, in;

    int64_t Head() const { return in.tokens - out.tokens; }  // tokens that move there, or come back
  };

  Exchange Find(int64_t heavy);
  void Consider(int64_t heavy, const Exchange& exchange, Exchange* best);
  bool KeepsLimits(int64_t heavy, const Exchange& exchange) const;
  const std::vector<Group>& Groups(int64_t rank);
  std::vector<Group> ListGroups(const std::vector<Piece>& pieces) const;

  const PlacementProblem& problem_;
  RankLoads& loads_;
  std::vector<std::vector<Group>> groups_;  // of each rank; listed when they are needed
  int64_t num_left_ = 0;                    // exchanges that may still be considered
};

}  // namespace cpd
