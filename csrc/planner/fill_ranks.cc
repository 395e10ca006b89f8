// The rank with the most room takes the part of a share with the most work per byte; repeat.
#include <algorithm>
#include <cmath>
#include <vector>

#include "planner/plan_steps.h"

namespace cpd {
namespace {

// The largest x with x * x <= value.
int64_t SquareRoot(int64_t value) {
  auto x = static_cast<int64_t>(std::sqrt(static_cast<double>(value)));
  while (x > 0 && x > value / x) --x;
  while (x + 1 <= value / (x + 1)) ++x;
  return x;
}

class Filler {
 public:
  Filler(const Filling& filling, Random* random, QueryShares* shares)
      : filling_(filling), random_(*random), shares_(*shares), problem_(shares->problem()) {}

  int64_t Run() {
    std::vector<bool> is_full(shares_.num_ranks());
    std::vector<int32_t> givers;
    while (true) {
      givers.clear();
      int64_t most_room = 0;
      taker_ = -1;
      for (int32_t rank = 0; rank < shares_.num_ranks(); ++rank) {
        const int64_t room = shares_.Limit(rank) - shares_.WorkOf(rank);
        if (room < 0) givers.push_back(rank);
        if (room <= 0 || is_full[rank]) continue;
        const int64_t weighed = room / 1000 * random_.Around1000(filling_.noise_per_mille);
        if (taker_ >= 0 && weighed <= most_room) continue;
        most_room = weighed;
        taker_ = rank;
      }
      if (givers.empty() || taker_ < 0) return num_considered_;
      room_ = shares_.Limit(taker_) - shares_.WorkOf(taker_);
      best_ = {};
      for (int32_t giver : givers) {
        const int32_t size = problem_.ranks_per_node;
        if (!filling_.inside_nodes || giver / size == taker_ / size) ConsiderRank(giver);
      }
      if (best_.part.document < 0) {
        is_full[taker_] = true;
      } else {
        shares_.Give(best_.part, taker_);
      }
    }
  }

 private:
  // A part of a share for the taker; `gain` work per `cost`.
  struct Candidate {
    Wide gain = 0;
    int64_t cost = 1;
    Share part{0, 0, 0, 0, -1};  // none
  };

  // What taker and giver compute of one document, and what their keys cost, if a query attends to
  // all earlier tokens. The keys are then those before the last query.
  struct Held {
    int64_t taker_end = 0, taker_keys = 0;
    int64_t giver_end = 0, giver_keys = 0;
    int64_t giver_second_end = 0;  // without its last share
  };

  void ConsiderRank(int32_t giver) {
    // It reaches a little less than the limit, so that it does not have to give again for a single
    // query.
    const int64_t limit = shares_.Limit(giver), fair = shares_.FairWork(giver);
    const int64_t margin = std::min(fair / 1000, (limit - fair) / 2);
    surplus_ = shares_.WorkOf(giver) - (limit - margin);
    for (int32_t document : shares_.Guests(giver)) ConsiderDocument(document, giver);
    for (int32_t document : shares_.HomeDocuments(giver)) {
      // No query that leaves its home has more work per byte than this.
      const Wide gain = Wide{problem_.lengths[document]} * (1000 + filling_.noise_per_mille);
      const bool is_found = best_.part.document >= 0;
      if (is_found && gain * best_.cost <= best_.gain * problem_.query_cost) break;
      ConsiderDocument(document, giver);
    }
  }

  void ConsiderDocument(int32_t document, int32_t giver) {
    Held held;
    for (const Share& share : shares_.Of(document)) {
      if (share.rank == taker_) held.taker_end = share.end;
      if (share.rank == giver) {
        held.giver_second_end = held.giver_end;
        held.giver_end = share.end;
      }
    }
    held.taker_keys = shares_.KeysCost(document, taker_, 0, held.taker_end);
    held.giver_keys = shares_.KeysCost(document, giver, 0, held.giver_end);
    num_considered_ += static_cast<int64_t>(shares_.Of(document).size()) / 4;
    for (const Share& share : shares_.Of(document)) {
      if (share.rank == giver) ConsiderShare(share, held);
    }
  }

  void ConsiderShare(const Share& share, const Held& held) {
    const int64_t work = shares_.Work(share);
    if (work <= room_) Consider(share, share, held);
    const int64_t wanted = std::min(surplus_, room_);
    if (work <= wanted) return;
    // Ends of the part: the last query; the first that leaves the head; where the taker has keys;
    // and where the bytes of n = wanted / end queries and of `end` keys are fewest.
    int64_t ends[4] = {share.end, EndFor(share, wanted), held.taker_end, 0};
    if (problem_.IsUnlimited()) {
      ends[3] = SquareRoot(wanted / problem_.key_cost * problem_.query_cost);
    }
    for (int64_t end : ends) {
      if (end <= share.start || end > share.end) continue;
      end = std::min(share.end, (end + filling_.block - 1) / filling_.block * filling_.block);
      int64_t start = StartFor(share, end, wanted) / filling_.block * filling_.block;
      if (shares_.Work(share.Cut(std::max(start, share.start), end)) > room_)
        start += filling_.block;
      start = std::max(share.start, std::min(start, end - filling_.min_queries));
      if (start - share.start < filling_.min_queries &&
          shares_.Work(share.Cut(share.start, end)) <= room_) {
        start = share.start;
      }
      Consider(share.Cut(start, end), share, held);
    }
  }

  // The last start at which queries up to `end` have the wanted work; else that of the share.
  int64_t StartFor(const Share& share, int64_t end, int64_t wanted) const {
    return FirstThat(share.start + 1, end + 1,
                     [&](int64_t start) { return shares_.Work(share.Cut(start, end)) < wanted; }) -
           1;
  }

  // The first end at which queries from the start of the share have the wanted work.
  int64_t EndFor(const Share& share, int64_t wanted) const {
    return FirstThat(share.start, share.end, [&](int64_t end) {
      return shares_.Work(share.Cut(share.start, end)) >= wanted;
    });
  }

  void Consider(const Share& part, const Share& share, const Held& held) {
    const int64_t work = shares_.Work(part);
    if (work > room_ || work <= 0) return;
    ++num_considered_;
    if (!shares_.IsAllowed(part, taker_)) return;
    const int64_t cost =
        problem_.IsUnlimited() ? CostChange(part, share, held) : shares_.CostChange(part, taker_);
    Wide gain = std::min(work, surplus_);
    if (cost <= 0) gain *= (1 - cost) * Wide{1'000'000};  // before all that cost something
    int64_t divisor = std::max<int64_t>(1, cost);
    const bool is_last = part.end == share.end;
    if (filling_.longest_first && is_last && surplus_ > room_ && work >= room_ / 10 * 9) {
      gain = Wide{part.end} << 40;  // before all others
      divisor = 1;
    }
    gain *= random_.Around1000(filling_.noise_per_mille);
    if (best_.part.document >= 0 && gain * best_.cost <= best_.gain * divisor) return;
    best_ = {gain, divisor, part};
  }

  int64_t CostChange(const Share& part, const Share& share, const Held& held) const {
    int64_t change = part.num_queries() * (shares_.QueryCost(part.home, taker_) -
                                           shares_.QueryCost(part.home, part.rank));
    if (part.end > held.taker_end) {
      change += shares_.KeysCost(part.document, taker_, 0, part.end) - held.taker_keys;
    }
    if (part.end == held.giver_end) {
      const int64_t left = part.start > share.start ? part.start : held.giver_second_end;
      change += shares_.KeysCost(part.document, part.rank, 0, left) - held.giver_keys;
    }
    return change;
  }

  const Filling& filling_;
  Random& random_;
  QueryShares& shares_;
  const QueryProblem& problem_;
  int32_t taker_ = -1;
  int64_t room_ = 0, surplus_ = 0;
  Candidate best_;
  int64_t num_considered_ = 0;
};

}  // namespace

int64_t FillRanks(const Filling& filling, Random* random, QueryShares* shares) {
  return Filler(filling, random, shares).Run();
}

}  // namespace cpd
