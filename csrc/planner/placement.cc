// Chooses among constructions which rank keeps which tokens of packed documents.
#include "planner/placement.h"

#include <algorithm>
#include <utility>

#include "planner/placement_steps.h"

namespace cpd {
namespace {

constexpr int64_t kSeeds = 4;         // half of them if there are nodes: these are placed, too
constexpr int64_t kSeedsOfNodes = 2;  // of nodes, and of the ranks of each
constexpr int64_t kRepairs = 4;
constexpr int64_t kRepairsOfBlocks = 1;  // that fail: those of similar candidates will, too
constexpr int64_t kFewRanks = 16;
constexpr int64_t kManyDocuments = 1 << 16;

struct Candidate {
  RankPieces ranks;
  PlacementCost cost;
};

// Repairs those candidates that may become the best: after a repair they have at least as many
// keys. The candidates with the fewest keys come first; of equal costs, only the first is repaired.
Candidate BestAfterRepair(const PlacementProblem& problem, std::vector<Candidate> candidates) {
  const auto hoped = [](PlacementCost cost) {
    cost.excess = 0;
    return cost;
  };
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [&](const Candidate& a, const Candidate& b) { return hoped(a.cost) < hoped(b.cost); });
  Candidate best;
  PlacementCost last;
  int64_t num_repairs = 0;
  const auto consider = [&](Candidate candidate) {
    if (best.ranks.empty() || candidate.cost < best.cost) best = std::move(candidate);
  };
  for (Candidate& candidate : candidates) {
    if (!best.ranks.empty() && !(hoped(candidate.cost) < best.cost)) break;
    if (!best.ranks.empty() && candidate.cost == last) continue;
    last = candidate.cost;
    const bool is_balanced = !best.ranks.empty() && best.cost.excess == 0;
    const bool is_hopeful = problem.block == 1 || num_repairs < kRepairsOfBlocks || is_balanced;
    if (candidate.cost.excess > 0 && is_hopeful && (num_repairs < kRepairs || !is_balanced)) {
      ++num_repairs;
      Candidate repaired = candidate;
      RepairBalance(problem, &repaired.ranks);
      repaired.cost = CostOf(problem, repaired.ranks);
      consider(std::move(repaired));
    }
    consider(std::move(candidate));
  }
  return best;
}

// Several constructions. `items` are documents, or pieces of them.
std::vector<Candidate> ListCandidates(const PlacementProblem& problem,
                                      const std::vector<Piece>& items, int64_t num_seeds) {
  // The number of steps grows linearly with the documents: if there are very many, fewer
  // constructions are tried.
  const auto num_documents = static_cast<int64_t>(items.size());
  int64_t most_seeds =
      std::max<int64_t>(1, num_seeds * kManyDocuments / std::max(kManyDocuments, num_documents));
  if (problem.block > 1) most_seeds = 1;  // most of them have to be repaired
  std::vector<Candidate> candidates;
  for (int64_t seed = 0; seed < most_seeds; ++seed) {
    for (int64_t dense_percent : {0, 85}) {
      for (int64_t reserve_percent : {0, 50}) {
        Closing closing;
        closing.reserve_percent = reserve_percent;
        closing.dense_percent = dense_percent;
        closing.seed = seed;
        RankPieces ranks = CloseRanks(problem, items, closing);
        if (problem.HasNodes()) ArrangeInNodes(problem, &ranks);
        const PlacementCost cost = CostOf(problem, ranks);
        candidates.push_back({std::move(ranks), cost});
      }
    }
  }
  return candidates;
}

Candidate Construct(const PlacementProblem& problem, const std::vector<Piece>& items) {
  const int64_t num_seeds = problem.num_ranks <= kFewRanks ? 2 * kSeeds : kSeeds;
  return BestAfterRepair(
      problem, ListCandidates(problem, items, problem.HasNodes() ? num_seeds / 2 : num_seeds));
}

RankPieces ConstructInNodes(const PlacementProblem& problem, const std::vector<Piece>& items) {
  std::vector<Candidate> candidates = ListCandidates(problem, items, kSeedsOfNodes);
  return std::move(
      std::min_element(candidates.begin(), candidates.end(),
                       [](const Candidate& a, const Candidate& b) { return a.cost < b.cost; })
          ->ranks);
}

// Places documents on nodes, as if each were one large rank, and then the pieces of each node on
// its ranks. Long documents that fit a node then do not leave it.
RankPieces ConstructByNodes(const PlacementProblem& problem, const std::vector<Piece>& items) {
  const PlacementProblem nodes = NodesOf(problem);
  const RankPieces by_node = ConstructInNodes(nodes, items);
  RankPieces ranks;
  for (int32_t node = 0; node < nodes.num_ranks; ++node) {
    std::vector<Piece> pieces = by_node[node];
    SortAndJoin(&pieces);
    RankPieces inside = ConstructInNodes(RanksOf(problem, node), pieces);
    for (std::vector<Piece>& rank : inside) ranks.push_back(std::move(rank));
  }
  return ranks;
}

PlacementProblem WithoutCapacity(PlacementProblem problem) {
  problem.max_received = PlacementProblem::kNoLimit;
  return problem;
}

}  // namespace

RankPieces PlaceDocuments(PlacementProblem problem) {
  if (!problem.table && problem.pairs.IsForward()) {
    problem.pairs = problem.pairs.Mirrored();
    RankPieces ranks = PlaceDocuments(problem);
    for (std::vector<Piece>& pieces : ranks) {
      for (Piece& piece : pieces) {
        const int64_t length = problem.lengths[piece.document];
        piece = {length - piece.end, length - piece.start, piece.document};
      }
      SortAndJoin(&pieces);
    }
    return ranks;
  }
  SetLimits(&problem);
  if (problem.HasCapacity()) {  // a search with a capacity may find less
    RankPieces free = PlaceDocuments(WithoutCapacity(problem));
    if (CostOf(problem, free).overflow == 0) return free;
  }
  std::vector<Piece> items;
  for (size_t i = 0; i < problem.lengths.size(); ++i) {
    if (problem.lengths[i] > 0) items.push_back({0, problem.lengths[i], static_cast<int32_t>(i)});
  }

  Candidate best = Construct(problem, items);
  const auto consider = [&](RankPieces ranks) {
    const PlacementCost cost = CostOf(problem, ranks);
    if (cost < best.cost) best = {std::move(ranks), cost};
  };
  if (problem.HasNodes()) {
    RankPieces by_nodes = ConstructByNodes(problem, items);
    PlacementCost hoped = CostOf(problem, by_nodes);
    const bool is_unbalanced = hoped.excess > 0;
    hoped.excess = 0;
    if (is_unbalanced && hoped < best.cost) RepairBalance(problem, &by_nodes);
    consider(std::move(by_nodes));
  }
  while (problem.block > 1 && (best.cost.overflow > 0 || best.cost.excess > 0)) {
    problem.block /= 2;  // everything else is worth more than aligned cuts
    consider(Construct(problem, items).ranks);
  }
  if (best.cost.excess > 0) {
    RankPieces mixed = MixDensities(problem, items);
    if (problem.HasNodes()) ArrangeInNodes(problem, &mixed);
    consider(std::move(mixed));
  }
  if (best.cost.excess > 0) {
    RankPieces swapped = best.ranks;
    SwapTokens(problem, &swapped);
    consider(std::move(swapped));
  }
  if (problem.HasCapacity() && (best.cost.overflow > 0 || best.cost.excess > 0)) {
    consider(ConcedeWork(problem, items));
  }
  for (std::vector<Piece>& pieces : best.ranks) SortAndJoin(&pieces);
  return std::move(best.ranks);
}

}  // namespace cpd
