// Chooses among constructions which rank keeps which tokens of packed documents.
#include "planner/placement.h"

#include <algorithm>

#include "planner/close_ranks.h"
#include "planner/item_pool.h"
#include "planner/repair.h"

namespace cpd {
namespace {

constexpr int64_t kSeeds = 4;
constexpr int64_t kFewRanks = 16;
constexpr int64_t kManyDocuments = 1 << 16;

}  // namespace

int64_t WorkLimit(const PlacementProblem& problem) {
  int64_t total = 0;
  for (int64_t length : problem.lengths) total += problem.pairs(length);
  const int64_t mean = total / problem.num_ranks;
  constexpr int64_t kMillion = 1'000'000;
  return mean + mean / kMillion * problem.tolerance_ppm +
         mean % kMillion * problem.tolerance_ppm / kMillion;
}

int64_t ReceivedKeys(const PairCount& pairs, std::vector<Piece>* pieces) {
  std::sort(pieces->begin(), pieces->end(), [](const Piece& a, const Piece& b) {
    return a.document != b.document ? a.document < b.document : a.start < b.start;
  });
  size_t last = 0;
  for (size_t i = 1; i < pieces->size(); ++i) {
    Piece& before = (*pieces)[last];
    const Piece& piece = (*pieces)[i];
    if (piece.document == before.document && piece.start == before.end) {
      before.end = piece.end;
    } else {
      (*pieces)[++last] = piece;
    }
  }
  if (!pieces->empty()) pieces->resize(last + 1);
  int64_t keys = 0, seen = 0;  // of this document: keys [0, seen) are local or not needed again
  int32_t document = -1;
  for (const Piece& piece : *pieces) {
    if (piece.document != document) document = piece.document, seen = 0;
    const int64_t from =
        pairs.window == 0 ? 0 : std::max<int64_t>(0, piece.start - pairs.window + 1);
    keys += std::max<int64_t>(0, piece.start - std::max(seen, from));
    seen = piece.end;
  }
  return keys;
}

PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks) {
  PlacementCost cost;
  const int64_t limit = WorkLimit(problem);
  for (std::vector<Piece> pieces : ranks) {
    int64_t work = 0;
    for (const Piece& piece : pieces) work += problem.pairs(piece.start, piece.end);
    cost.excess = std::max(cost.excess, work - limit);
    cost.received_keys += ReceivedKeys(problem.pairs, &pieces);
  }
  return cost;
}

RankPieces PlaceDocuments(const PlacementProblem& problem) {
  std::vector<Piece> sorted;
  for (size_t i = 0; i < problem.lengths.size(); ++i) {
    if (problem.lengths[i] > 0) sorted.push_back({0, problem.lengths[i], static_cast<int32_t>(i)});
  }
  std::sort(sorted.begin(), sorted.end(), ItemPool::Before);

  // The number of steps grows linearly with the documents: if there are very many, fewer
  // constructions are tried.
  const auto num_documents = static_cast<int64_t>(sorted.size());
  const int64_t num_seeds = problem.num_ranks <= kFewRanks ? 2 * kSeeds : kSeeds;
  const int64_t most_seeds =
      std::max<int64_t>(1, num_seeds * kManyDocuments / std::max(kManyDocuments, num_documents));
  RankPieces best;
  PlacementCost best_cost;
  for (int64_t seed = 0; seed < most_seeds; ++seed) {
    for (int64_t dense_percent : {0, 85}) {
      for (int64_t reserve_percent : {0, 50}) {
        Closing closing;
        closing.reserve_percent = reserve_percent;
        closing.dense_percent = dense_percent;
        closing.seed = seed;
        RankPieces ranks = CloseRanks(problem, sorted, closing);
        PlacementCost cost = CostOf(problem, ranks);
        if (cost.excess > 0 && (best.empty() || best_cost.excess > 0 ||
                                cost.received_keys < best_cost.received_keys)) {
          RepairBalance(problem, &ranks);
          cost = CostOf(problem, ranks);
        }
        if (best.empty() || cost < best_cost) best = std::move(ranks), best_cost = cost;
      }
    }
  }
  for (std::vector<Piece>& pieces : best) ReceivedKeys(problem.pairs, &pieces);  // sorts and joins
  return best;
}

}  // namespace cpd
