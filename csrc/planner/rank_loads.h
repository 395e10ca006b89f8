// The ranks of a placement that is repaired, with the work and the received rows of each.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/placement.h"

namespace cpd {

class RankLoads {
 public:
  RankLoads(const PlacementProblem& problem, RankPieces* ranks);

  const std::vector<Piece>& Pieces(int64_t rank) const { return ranks_[rank]; }
  int64_t Rows(int64_t rank) const { return rows_[rank]; }
  // Work that the rank may still get; negative above its limit.
  int64_t Room(int64_t rank) const { return problem_.limits[rank] - work_[rank]; }
  int64_t NumAbove() const;  // ranks above the limit
  int64_t Heaviest() const;  // the rank with the least room
  // Up to `num` ranks with the most room.
  std::vector<int64_t> Lightest(int64_t num) const;

  void Replace(int64_t rank, std::vector<Piece> pieces);

 private:
  void Count(int64_t rank);

  const PlacementProblem& problem_;
  RankPieces& ranks_;
  std::vector<int64_t> work_, rows_;  // of each rank
};

// What an exchange of pieces costs in keys, and the work that it removes from a rank.
struct Price {
  static constexpr int64_t kCut = 32;  // extra cost of a cut, in keys

  int64_t cost = 0;
  int64_t gain = 0;  // 0: no exchange

  // Fewer keys per unit of removed work.
  bool operator<(const Price& other) const {
    if (gain == 0 || other.gain == 0) return gain > 0 && other.gain == 0;
    return static_cast<Wide>(cost) * other.gain < static_cast<Wide>(other.cost) * gain;
  }
};

}  // namespace cpd
