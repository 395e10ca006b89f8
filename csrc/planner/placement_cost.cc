// What a placement costs: rows above the capacity, work above the limits, keys that move.
#include <algorithm>
#include <numeric>

#include "planner/placement.h"

namespace cpd {
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
