// Fills ranks once, then again and again in part, and keeps what moves fewer bytes.
#include "planner/move_queries.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "planner/fill_ranks.h"
#include "planner/query_shares.h"

namespace cpd {
namespace {

// The last part of a cut document is computed where the part before it is, if that moves fewer
// bytes: its rank then does not need the keys of the rest.
void JoinLastParts(QueryShares* shares) {
  for (int32_t document = 0; document < shares->num_documents(); ++document) {
    const std::vector<Share>& parts = shares->Of(document);
    if (parts.size() < 2) continue;
    const Share last = parts.back();
    const int32_t before = parts[parts.size() - 2].rank;
    if (shares->CostChange(document, last, last.start, last.end, before) < 0) {
      shares->Give(document, last.start, last.end, last.rank, before);
    }
  }
}

// Improves an assignment. The better one exceeds the limit by less; then it costs less.
class Search {
 public:
  Search(const QueryProblem& problem, bool longest_first) : problem_(problem), shares_(problem) {
    for (int32_t document = 0; document < shares_.num_documents(); ++document) {
      if (shares_.Of(document).size() > 1) cut_.push_back(document);
    }
    JoinLastParts(&shares_);
    FillRanks({problem.min_queries, 0, longest_first}, &random_, &shares_);
    // Shorter parts only if nothing else keeps the limit.
    if (shares_.Excess() > 0) FillRanks({1, 0, longest_first}, &random_, &shares_);
  }

  const QueryShares& shares() const { return shares_; }
  std::pair<int64_t, int64_t> Cost() const { return {shares_.Excess(), shares_.Cost()}; }

  void Run(int64_t num_steps) {
    std::pair<int64_t, int64_t> best = Cost();
    const int64_t per_round = 8 + problem_.num_ranks / 8;
    for (int64_t steps = 0; steps < num_steps; steps += per_round) {
      shares_.Record();
      const int64_t kind = random_.Below(4);
      Ruin(kind > 0);
      if (kind >= 2) MoveOneShare();
      const int64_t noise = kind % 2 == 1 ? kNoisePerMille : 0;
      steps += FillRanks({problem_.min_queries, noise, random_.Below(2) == 1}, &random_, &shares_);
      const std::pair<int64_t, int64_t> cost = Cost();
      if (cost <= best) {
        best = cost;
      } else {
        shares_.Undo();
      }
    }
  }

 private:
  static constexpr int64_t kNoisePerMille = 200;

  // Sends the guests of a few ranks home. Ranks that compute the same document are related.
  void Ruin(bool prefers_related) {
    std::vector<int32_t> ranks{RandomRank()};
    for (int64_t left = 1 + random_.Below(3); left > 0; --left) {
      const std::vector<int32_t>& guests = shares_.Guests(Any(ranks));
      if (prefers_related && !guests.empty()) {
        ranks.push_back(Any(shares_.Of(Any(guests))).rank);
      } else {
        ranks.push_back(RandomRank());
      }
    }
    for (int32_t rank : ranks) shares_.SendHome(rank);
  }

  // Gives a share of a cut document to the rank of another of its shares.
  void MoveOneShare() {
    if (cut_.empty()) return;
    const int32_t document = Any(cut_);
    const Share from = Any(shares_.Of(document)), to = Any(shares_.Of(document));
    if (from.rank != to.rank) {
      shares_.Give(document, from.start, from.end, from.rank, to.rank);
    }
  }

  int32_t RandomRank() { return static_cast<int32_t>(random_.Below(problem_.num_ranks)); }

  template <typename T>
  const T& Any(const std::vector<T>& values) {
    return values[random_.Below(static_cast<int64_t>(values.size()))];
  }

  const QueryProblem& problem_;
  QueryShares shares_;
  Random random_;
  std::vector<int32_t> cut_;  // documents with several homes
};

RankPieces PiecesOf(const QueryShares& shares) {
  RankPieces ranks(shares.num_ranks());
  for (int32_t document = 0; document < shares.num_documents(); ++document) {
    for (const Share& share : shares.Of(document)) {
      std::vector<Piece>& pieces = ranks[share.rank];
      if (!pieces.empty() && pieces.back().document == document &&
          pieces.back().end == share.start) {
        pieces.back().end = share.end;
      } else {
        pieces.push_back({share.start, share.end, document});
      }
    }
  }
  return ranks;
}

}  // namespace

RankPieces MoveQueries(const QueryProblem& problem) {
  if (problem.num_ranks == 1) return PiecesOf(QueryShares(problem));
  // Candidates to consider, in all.
  const int64_t num_steps = std::min<int64_t>(10'000 + 1000 * problem.num_ranks, 400'000);
  Search a(problem, true), b(problem, false);
  a.Run(num_steps / 4);
  b.Run(num_steps / 4);
  Search& best = a.Cost() <= b.Cost() ? a : b;
  best.Run(num_steps / 2);
  return PiecesOf(best.shares());
}

}  // namespace cpd
