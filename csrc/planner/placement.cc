// Chooses among constructions which rank keeps which tokens of packed documents.
#include "planner/placement.h"

#include <algorithm>
#include <numeric>
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

// ---- What a placement costs: rows above the capacity, work above the limits, keys that move.
std::vector<Overflow> ListOverflows(const PlacementProblem& problem, const RankPieces& ranks) {
  std::vector<Overflow> overflows;
  for (const std::vector<Piece>& pieces : ranks) {
    int64_t rows = 0, most = 0;
    int32_t document = 0;
    problem.ForEachNeed(pieces, [&](int32_t of, int64_t first, int64_t last) {
      rows += last - first;
      if (last - first > most) most = last - first, document = of;
    });
    if (rows > problem.max_received) overflows.push_back({document, rows - problem.max_received});
  }
  return overflows;
}

std::vector<int64_t> WorkLimits(int64_t total, const std::vector<int64_t>& speeds,
                                int64_t tolerance_ppm) {
  const Wide speed = std::accumulate(speeds.begin(), speeds.end(), static_cast<int64_t>(0));
  constexpr int64_t kMillion = 1'000'000;
  std::vector<int64_t> limits;
  for (int64_t s : speeds) {
    const auto share = static_cast<int64_t>(static_cast<Wide>(total) * s / speed);
    limits.push_back(share + share / kMillion * tolerance_ppm +
                     share % kMillion * tolerance_ppm / kMillion);
  }
  return limits;
}

void SetLimits(PlacementProblem* problem) {
  int64_t total = 0;
  for (size_t d = 0; d < problem->lengths.size(); ++d) {
    total += problem->Work({0, problem->lengths[d], static_cast<int32_t>(d)});
  }
  if (problem->speeds.empty()) problem->speeds.assign(problem->num_ranks, 1);
  problem->limits = WorkLimits(total, problem->speeds, problem->tolerance_ppm);
}

void SortAndJoin(std::vector<Piece>* pieces) {
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
}

int64_t ReceivedRows(const PlacementProblem& problem, std::vector<Piece>* pieces) {
  SortAndJoin(pieces);
  int64_t rows = 0;
  problem.ForEachNeed(*pieces, [&](int32_t, int64_t first, int64_t last) { rows += last - first; });
  return rows;
}

int64_t ReceivedKeys(const PlacementProblem& problem, std::vector<Piece>* pieces) {
  int64_t keys = ReceivedRows(problem, pieces);
  for (const Piece& piece : *pieces) keys -= piece.num_tokens();
  return keys;
}

std::vector<Traffic> ListTraffic(const PlacementProblem& problem, const RankPieces& ranks) {
  struct Held {
    Piece piece;
    int32_t rank;
  };
  std::vector<Held> held;  // only of cut documents: whole ones do not move
  std::vector<char> is_cut(problem.lengths.size(), 0);
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const Piece& piece : ranks[r]) {
      if (piece.num_tokens() == problem.lengths[piece.document]) continue;
      held.push_back({piece, static_cast<int32_t>(r)});
      is_cut[piece.document] = 1;
    }
  }
  const auto before = [](const Held& a, const Held& b) {
    return a.piece.document != b.piece.document ? a.piece.document < b.piece.document
                                                : a.piece.start < b.piece.start;
  };
  std::sort(held.begin(), held.end(), before);
  std::vector<Traffic> traffic;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto target = static_cast<int32_t>(r);
    std::vector<Piece> mine = ranks[r];
    SortAndJoin(&mine);
    problem.ForEachNeed(mine, [&](int32_t document, int64_t first, int64_t last) {
      if (!is_cut[document]) return;
      auto from =
          std::upper_bound(held.begin(), held.end(), Held{{first, first, document}, 0}, before);
      for (--from;
           from != held.end() && from->piece.document == document && from->piece.start < last;
           ++from) {
        const int64_t keys = std::min(from->piece.end, last) - std::max(from->piece.start, first);
        if (from->rank != target && keys > 0) traffic.push_back({from->rank, target, keys});
      }
    });
  }
  return traffic;
}

PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks) {
  PlacementCost cost;
  RankPieces sorted = ranks;
  const int64_t fastest = *std::max_element(problem.speeds.begin(), problem.speeds.end());
  for (size_t r = 0; r < sorted.size(); ++r) {
    int64_t work = 0;
    for (const Piece& piece : sorted[r]) work += problem.Work(piece);
    // A slow rank takes longer for the same excess.
    const int64_t above = std::max<int64_t>(0, work - problem.limits[r]);
    const auto excess =
        static_cast<int64_t>(static_cast<Wide>(above) * fastest / problem.speeds[r]);
    cost.excess = std::max(cost.excess, excess);
    cost.received_keys += ReceivedKeys(problem, &sorted[r]);
  }
  if (problem.HasCapacity()) {
    for (const Overflow& x : ListOverflows(problem, sorted)) cost.overflow += x.rows;
  }
  if (problem.HasNodes()) {
    for (const Traffic& x : ListTraffic(problem, ranks)) {
      const int32_t m = problem.ranks_per_node;
      if (x.source / m != x.target / m) cost.between_nodes += x.keys;
    }
  }
  return cost;
}

}  // namespace cpd
