// Counts the work and the received rows of ranks whose pieces change.
#include "planner/rank_loads.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace cpd {

RankLoads::RankLoads(const PlacementProblem& problem, RankPieces* ranks)
    : problem_(problem), ranks_(*ranks), work_(ranks->size()), rows_(ranks->size()) {
  for (size_t r = 0; r < ranks_.size(); ++r) Count(static_cast<int64_t>(r));
}

int64_t RankLoads::NumAbove() const {
  int64_t above = 0;
  for (int64_t r = 0; r < problem_.num_ranks; ++r) above += Room(r) < 0;
  return above;
}

int64_t RankLoads::Heaviest() const {
  int64_t heavy = 0;
  for (int64_t r = 1; r < problem_.num_ranks; ++r) {
    if (Room(r) < Room(heavy)) heavy = r;
  }
  return heavy;
}

std::vector<int64_t> RankLoads::Lightest(int64_t num) const {
  std::vector<int64_t> light(ranks_.size());
  std::iota(light.begin(), light.end(), 0);
  num = std::min<int64_t>(num, light.size());
  std::partial_sort(light.begin(), light.begin() + num, light.end(), [this](int64_t a, int64_t b) {
    return Room(a) != Room(b) ? Room(a) > Room(b) : a < b;
  });
  light.resize(num);
  return light;
}

void RankLoads::Replace(int64_t rank, std::vector<Piece> pieces) {
  ranks_[rank] = std::move(pieces);
  Count(rank);
}

void RankLoads::Count(int64_t rank) {
  work_[rank] = 0;
  for (const Piece& piece : ranks_[rank]) work_[rank] += problem_.Work(piece);
  std::vector<Piece> pieces = ranks_[rank];
  rows_[rank] = ReceivedRows(problem_, &pieces);
}

}  // namespace cpd
