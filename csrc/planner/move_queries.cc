// Fills ranks once, then again and again in part, and keeps what moves fewer bytes. If pieces of
// the wanted size do not reach the limit of work, likewise with any pieces.
#include "planner/move_queries.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/plan_steps.h"
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
    if (shares->CostChange(last, before) < 0 && shares->IsAllowed(last, before)) {
      shares->Give(last, before);
    }
  }
}

// What is wrong with an assignment, the most important part first: rows beyond capacities, work
// beyond limits, the cost of movement.
using Badness = std::tuple<int64_t, int64_t, int64_t>;

// Improves an assignment.
class Search {
 public:
  Search(const QueryProblem& problem, bool longest_first) : problem_(problem), shares_(problem) {
    for (int32_t document = 0; document < shares_.num_documents(); ++document) {
      if (shares_.Of(document).size() > 1) cut_.push_back(document);
    }
    JoinLastParts(&shares_);
    if (problem.HasCapacities()) KeepCapacities(&shares_);
    Fill(problem.block, problem.wanted_piece, 0, longest_first);
    // Other cuts and shorter pieces only if nothing else keeps the limits.
    if (shares_.Excess() > 0) Fill(1, 1, 0, longest_first);
  }

  const QueryShares& shares() const { return shares_; }
  bool IsGood() const { return shares_.Overflow() == 0 && shares_.Excess() == 0; }
  Badness HowBad() const { return {shares_.Overflow(), shares_.Excess(), shares_.Cost()}; }

  void Run(int64_t num_steps) {
    is_searching_ = true;
    Badness best = HowBad();
    const int64_t per_round = 8 + problem_.num_ranks / 8;
    for (int64_t steps = 0; steps < num_steps; steps += per_round) {
      shares_.Record();
      const int64_t kind = random_.Below(4);
      Ruin(kind > 0);
      if (kind >= 2) MoveOneShare();
      if (problem_.HasCapacities()) {
        steps += KeepCapacities(&shares_) / 256;
        if (std::get<1>(best) > 0) {
          const int64_t rows = 1 + random_.Below(problem_.columns_per_rank / 2 + 1);
          steps += MakeRoom(RankBelowLimit(), rows, &shares_) / 256;
        }
      }
      const int64_t noise = kind % 2 == 1 ? kNoisePerMille : 0;
      steps += Fill(problem_.block, problem_.wanted_piece, noise, random_.Below(2) == 1);
      const Badness now = HowBad();
      if (now <= best) {
        best = now;
      } else {
        shares_.Undo();
      }
    }
  }

 private:
  static constexpr int64_t kNoisePerMille = 200;

  int64_t Fill(int64_t block, int64_t wanted_piece, int64_t noise_per_mille, bool longest_first) {
    Filling filling{wanted_piece, block, noise_per_mille, longest_first, false};
    int64_t num_considered = 0;
    if (problem_.HasNodes() && (longest_first || is_searching_)) {
      filling.inside_nodes = true;
      num_considered = FillRanks(filling, &random_, &shares_);
      filling.inside_nodes = false;
    }
    return num_considered + FillRanks(filling, &random_, &shares_);
  }

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
    if (from.rank != to.rank && shares_.IsAllowed(from, to.rank)) shares_.Give(from, to.rank);
  }

  int32_t RankBelowLimit() {
    int32_t rank = RandomRank();
    for (int tries = 8; tries > 0 && shares_.WorkOf(rank) > shares_.FairWork(rank); --tries) {
      rank = RandomRank();
    }
    return rank;
  }

  int32_t RandomRank() { return static_cast<int32_t>(random_.Below(problem_.num_ranks)); }

  template <typename T>
  const T& Any(const std::vector<T>& values) {
    return values[random_.Below(static_cast<int64_t>(values.size()))];
  }

  const QueryProblem& problem_;
  QueryShares shares_;
  Random random_;
  bool is_searching_ = false;
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

// Whether all ranks have room for their queries and keys. Pieces are sorted.
bool HaveRoom(const QueryProblem& problem, const RankPieces& ranks) {
  for (const std::vector<Piece>& pieces : ranks) {
    int64_t queries = 0, keys = 0;
    for (const Piece& piece : pieces) queries += piece.num_tokens();
    problem.ForEachNeed(pieces,
                        [&](int32_t, int64_t first, int64_t last) { keys += last - first; });
    if (queries > problem.max_queries || keys > problem.max_keys) return false;
  }
  return true;
}

std::pair<Badness, RankPieces> BestOfTwo(const QueryProblem& problem) {
  // Candidates to consider, in all.
  const int64_t num_steps = std::min<int64_t>(10'000 + 1000 * problem.num_ranks, 400'000);
  Search a(problem, true), b(problem, false);
  a.Run(num_steps / 4);
  b.Run(num_steps / 4);
  Search& best = a.HowBad() <= b.HowBad() ? a : b;
  best.Run(num_steps / 2);
  if (problem.HasCapacities()) {
    for (int more = 8; more > 0 && !best.IsGood(); --more) best.Run(num_steps);
  }
  return {best.HowBad(), PiecesOf(best.shares())};
}

RankPieces Plan(const QueryProblem& problem) {
  if (problem.num_ranks == 1) return PiecesOf(QueryShares(problem));
  auto [badness, ranks] = BestOfTwo(problem);
  if (std::get<1>(badness) > 0 && problem.wanted_piece > 1 && !problem.HasCapacities() &&
      std::accumulate(problem.lengths.begin(), problem.lengths.end(), int64_t{0}) <=
          problem.kFewTokens) {
    QueryProblem finer = problem;
    finer.wanted_piece = 1;
    auto [now, pieces] = BestOfTwo(finer);
    if (std::get<1>(now) < std::get<1>(badness)) ranks = std::move(pieces);
  }
  return std::move(ranks);
}

}  // namespace

RankPieces MoveQueries(QueryProblem problem) {
  QueryProblem without = problem;
  without.max_queries = without.max_keys = QueryProblem::kNoLimit;
  RankPieces ranks = Plan(without);
  return HaveRoom(problem, ranks) ? ranks : Plan(problem);
}

}  // namespace cpd
