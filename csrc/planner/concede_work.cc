// Searches the least work above the limit with which ranks keep their capacity.
#include <algorithm>
#include <functional>
#include <utility>

#include "planner/placement.h"

namespace cpd {
namespace {

constexpr int kAttemptRounds = 9;
constexpr int64_t kAttemptSeeds = 4;
constexpr int64_t kAttemptRepairs = 3;
constexpr int64_t kPermille = 1000;

// The middle of a range of ratios: the square root of their product, rounded down.
int64_t MiddleOf(int64_t low, int64_t high) {
  int64_t middle = low;
  for (int64_t step = high - low; step > 0; step /= 2) {
    while (middle + step <= high && (middle + step) * (middle + step) <= low * high) middle += step;
  }
  return middle;
}

struct Attempt {
  int64_t number = 0;
  RankPieces ranks;
  PlacementCost cost, hoped;     // as it is; if ranks that need not have more work are repaired
  std::vector<char> may_exceed;  // of each rank: the work limit
  std::vector<int32_t> others;   // documents that need more work, but not for the capacity
  bool is_repaired = false;
};

class WorkSearch {
 public:
  WorkSearch(const PlacementProblem& problem, const std::vector<Piece>& items)
      : problem_(problem), items_(items), is_tight_(problem.lengths.size()) {
    const int64_t limit = *std::min_element(problem.limits.begin(), problem.limits.end());
    for (size_t d = 0; d < is_tight_.size(); ++d) {
      const int64_t length = problem.lengths[d], last = std::max<int64_t>(0, length - 1);
      is_tight_[d] = length + problem.tokens_per_rank > problem.max_received ||
                     problem.Work({last, length, static_cast<int32_t>(d)}) > limit / 2;
    }
  }

  // Documents for which the capacity can need more work get the same, by bisection.
  void Run(const Closing& closing) {
    std::vector<Concession> concessions(problem_.lengths.size());
    int64_t low = kPermille, given = kPermille, high = 0;  // 0: not known
    bool was_new = false;
    for (int round = 0; round < kAttemptRounds; ++round) {
      RankPieces ranks = Close(closing, &concessions);
      int64_t needed = kPermille;
      for (size_t d = 0; d < concessions.size(); ++d) {
        if (is_tight_[d]) needed = std::max(needed, concessions[d].needed_permille);
      }
      bool is_new = false;
      for (const Overflow& overflow : ListOverflows(problem_, ranks)) {
        needed = std::max(needed, MostWork(overflow.document));
        is_new |= !is_tight_[overflow.document];
        is_tight_[overflow.document] = 1;
      }
      Keep(std::move(ranks), concessions);
      if (needed > given) {
        if (!is_new || was_new) low = given;
        if (high == 0) high = needed;
      } else if (high > 0) {
        high = given;
      }
      was_new = is_new && !was_new;  // once more, now that these have it
      if (!is_new && high <= low + low / 100) break;
      given = MiddleOf(low, std::max(low, high));
      Give(given, &concessions);
    }
    Give(std::max(low, high), &concessions);
    for (int64_t seed = 0; seed < kAttemptSeeds; ++seed) {  // others may fit the other ranks better
      for (int64_t reserve_percent : {0, 50}) {
        Closing other = closing;
        other.seed = seed, other.reserve_percent = reserve_percent;
        Keep(Close(other, &concessions), concessions);
      }
    }
  }

  // The best result. Those that are it already, and those that may become it, are repaired: first
  // the ranks that need not have more work.
  const RankPieces& Best() {
    for (PlacementCost Attempt::* cost : {&Attempt::hoped, &Attempt::cost}) {
      const auto num = std::min<int64_t>(kAttemptRepairs, attempts_.size());
      std::partial_sort(attempts_.begin(), attempts_.begin() + num, attempts_.end(),
                        [&](const Attempt& a, const Attempt& b) {
                          return a.*cost == b.*cost ? a.number < b.number : a.*cost < b.*cost;
                        });
      for (int64_t i = 0; i < num; ++i) Repair(&attempts_[i]);
    }
    return best_.ranks;
  }

  // Other documents may need more work, too: those that may have more have left them few short
  // documents to be beside. Returns whether another search can be better.
  bool Extend() {
    if (best_.cost.excess == 0) return false;
    bool is_new = false;
    for (int32_t document : best_.others) {
      is_new |= !is_tight_[document];
      is_tight_[document] = 1;
    }
    return is_new;
  }

 private:
  RankPieces Close(const Closing& closing, std::vector<Concession>* concessions) const {
    RankPieces ranks = CloseRanks(problem_, items_, closing, concessions);
    if (problem_.HasNodes()) ArrangeInNodes(problem_, &ranks);
    for (std::vector<Piece>& pieces : ranks) SortAndJoin(&pieces);
    return ranks;
  }

  void Give(int64_t permille, std::vector<Concession>* concessions) const {
    for (size_t d = 0; d < concessions->size(); ++d) {
      (*concessions)[d].needed_permille = kPermille;
      if (is_tight_[d]) (*concessions)[d].work_permille = permille;
    }
  }

  void Keep(RankPieces ranks, const std::vector<Concession>& concessions) {
    Attempt attempt;
    attempt.number = static_cast<int64_t>(attempts_.size());
    attempt.may_exceed.resize(ranks.size());
    PlacementProblem hoped = problem_;
    for (size_t r = 0; r < ranks.size(); ++r) {
      for (const Piece& piece : ranks[r]) attempt.may_exceed[r] |= is_tight_[piece.document];
      if (!attempt.may_exceed[r]) hoped.limits[r] = PlacementProblem::kNoLimit;
    }
    for (size_t d = 0; d < concessions.size(); ++d) {
      if (!is_tight_[d] && concessions[d].needed_permille > kPermille) {
        attempt.others.push_back(static_cast<int32_t>(d));
      }
    }
    attempt.cost = CostOf(problem_, ranks);
    attempt.hoped = CostOf(hoped, ranks);
    attempt.ranks = std::move(ranks);
    attempts_.push_back(std::move(attempt));
  }

  void Repair(Attempt* attempt) {
    if (attempt->is_repaired) return;
    attempt->is_repaired = true;
    if (!best_.ranks.empty() && !(attempt->hoped < best_.cost)) return;
    const auto consider = [&] {
      if (best_.ranks.empty() || attempt->cost < best_.cost) best_ = *attempt;
    };
    consider();
    PlacementProblem conceded = problem_;
    for (size_t r = 0; r < conceded.limits.size(); ++r) {
      if (!attempt->may_exceed[r]) continue;
      conceded.limits[r] = std::max(conceded.limits[r], problem_.WorkOf(attempt->ranks[r]));
    }
    for (const PlacementProblem& problem : {std::cref(conceded), std::cref(problem_)}) {
      RepairBalance(problem, &attempt->ranks);
      attempt->cost = CostOf(problem_, attempt->ranks);
      consider();
    }
  }

  // With this much work, a rank can hold any tokens of the document.
  int64_t MostWork(int32_t document) const {
    const int64_t length = problem_.lengths[document];
    const int64_t tail = std::max<int64_t>(0, length - problem_.tokens_per_rank);
    const int64_t limit = *std::min_element(problem_.limits.begin(), problem_.limits.end());
    return kPermille +
           problem_.Work({tail, length, document}) / std::max<int64_t>(1, limit / kPermille);
  }

  const PlacementProblem& problem_;
  const std::vector<Piece>& items_;
  std::vector<char>
      is_tight_;  // of each document: the capacity can need more work than balance allows
  std::vector<Attempt> attempts_;
  Attempt best_;
};

}  // namespace

RankPieces ConcedeWork(const PlacementProblem& problem, const std::vector<Piece>& items) {
  WorkSearch search(problem, items);
  RankPieces best;
  do {
    for (int64_t dense_percent : {0, 85}) {
      Closing closing;
      closing.dense_percent = dense_percent;
      search.Run(closing);
    }
    best = search.Best();
  } while (search.Extend());
  return best;
}

}  // namespace cpd
