// The rank that exceeds its capacities most gives away the part with the most rows per byte;
// repeat.
#include <algorithm>
#include <numeric>
#include <vector>

#include "planner/plan_steps.h"

namespace cpd {
namespace {

constexpr int kMostParts = 64;

class Relief {
 public:
  Relief(int64_t reserve, QueryShares* shares)
      : shares_(*shares), problem_(shares->problem()), reserve_(reserve) {}

  void RelieveAll() {
    std::vector<bool> is_stuck(shares_.num_ranks());
    while (num_considered_ < kMostConsidered) {
      int32_t worst = -1;
      for (int32_t rank = 0; rank < shares_.num_ranks(); ++rank) {
        if (is_stuck[rank] || shares_.Overflow(rank) == 0) continue;
        if (worst < 0 || shares_.Overflow(rank) > shares_.Overflow(worst)) worst = rank;
      }
      if (worst < 0) return;
      is_stuck[worst] = !Relieve(worst);
    }
  }

  int64_t num_considered() const { return num_considered_; }

  // Gives one part away from the rank. Returns whether that is possible.
  bool Relieve(int32_t rank) {
    giver_ = rank;
    overflow_ = shares_.Overflow(rank, reserve_);
    best_ = {};
    if (overflow_ == 0) return false;
    FindRoom();
    for (int32_t document : shares_.Guests(rank)) ConsiderDocument(document);
    for (int32_t document : shares_.HomeDocuments(rank)) ConsiderDocument(document);
    if (best_.taker < 0) return false;
    shares_.Give(best_.part, best_.taker);
    return true;
  }

 private:
  // A part of a share for `taker`; `gain` rows per `cost`.
  struct Candidate {
    Wide gain = 0;
    Wide cost = 1;
    int32_t taker = -1;
    Share part;
  };

  void ConsiderDocument(int32_t document) {
    for (const Share& share : shares_.Of(document)) {
      if (share.rank != giver_) continue;
      Consider(share);
      if (share.num_queries() <= overflow_) continue;
      Consider(share.Cut(share.end - overflow_, share.end));
      Consider(share.Cut(share.start, share.start + overflow_));
    }
  }

  void Consider(const Share& part) {
    const int64_t gain = overflow_ - shares_.OverflowIf(part, giver_, -1, reserve_);
    if (gain <= 0) return;
    for (const Share& other : shares_.Of(part.document)) {
      Consider(part, gain, other.rank);
      Consider(part, gain, other.home);
    }
    for (int32_t taker : with_room_) Consider(part, gain, taker);
  }

  void Consider(const Share& part, int64_t gain, int32_t taker) {
    ++num_considered_;
    if (taker == giver_ || !shares_.IsAllowed(part, taker)) return;
    const int64_t work = shares_.Work(part);
    Wide cost = std::max<int64_t>(1, shares_.CostChange(part, taker));
    if (shares_.WorkOf(taker) + work > shares_.Limit(taker)) cost *= 4;
    if (reserve_ > 0) cost *= 1 + work / gain;
    if (best_.taker >= 0 && gain * best_.cost <= best_.gain * cost) return;
    best_ = {gain, cost, taker, part};
  }

  // Finds a few ranks with the fewest rows.
  void FindRoom() {
    with_room_.resize(shares_.num_ranks());
    std::iota(with_room_.begin(), with_room_.end(), 0);
    const auto num = std::min<size_t>(kTakers, with_room_.size());
    const auto rows = [&](int32_t rank) { return shares_.QueriesOf(rank) + shares_.KeysOf(rank); };
    std::partial_sort(
        with_room_.begin(), with_room_.begin() + num, with_room_.end(),
        [&](int32_t a, int32_t b) { return rows(a) != rows(b) ? rows(a) < rows(b) : a < b; });
    with_room_.resize(num);
    std::sort(with_room_.begin(), with_room_.end());
  }

  static constexpr size_t kTakers = 64;
  static constexpr int64_t kMostConsidered = 1'000'000;

  QueryShares& shares_;
  const QueryProblem& problem_;
  int64_t reserve_ = 0;
  int32_t giver_ = -1;
  int64_t overflow_ = 0;
  std::vector<int32_t> with_room_;
  Candidate best_;
  int64_t num_considered_ = 0;
};

}  // namespace

int64_t KeepCapacities(QueryShares* shares) {
  Relief relief(0, shares);
  relief.RelieveAll();
  return relief.num_considered();
}

int64_t MakeRoom(int32_t rank, int64_t rows, QueryShares* shares) {
  Relief relief(rows, shares);
  for (int steps = kMostParts; steps > 0 && relief.Relieve(rank);) --steps;
  return relief.num_considered();
}

}  // namespace cpd
