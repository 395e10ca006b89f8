// Plans which rank computes which queries: fills ranks, keeps their capacities.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "planner/problem.h"
#include "planner/query_shares.h"

namespace cpd {

// ---- The rank with the most room takes the part of a share with the most work per byte; repeat.

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

// ---- The rank that exceeds its capacities most gives away the part with the most rows per byte;
// repeat.

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
    KeepSmallest(&with_room_, kTakers,
                 [&](int32_t rank) { return shares_.QueriesOf(rank) + shares_.KeysOf(rank); });
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

// ---- Fills ranks once, then again and again in part, and keeps what moves fewer bytes. If pieces
// of the wanted size do not reach the limit of work, likewise with any pieces.

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

constexpr int64_t kMostTolerance = 8'000'000;
constexpr int64_t kPartOfSearch = 8;

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

// The time of the slowest rank: its work, and what it waits for rows that it sends or receives.
int64_t SlowestTime(const QueryProblem& problem, const RankPieces& ranks) {
  std::vector<LinkRows> keys(ranks.size()), queries(ranks.size());
  std::vector<int64_t> work(ranks.size());
  const auto move = [&](int32_t document, int64_t start, int64_t end, int32_t to,
                        std::vector<LinkRows>* rows) {
    const int64_t column = problem.columns[document];
    for (int64_t last; start < end; start = last) {
      const auto home = static_cast<int32_t>((column + start) / problem.columns_per_rank);
      last = std::min(end, (home + 1) * problem.columns_per_rank - column);
      if (home == to) continue;
      const bool is_between = problem.NodeOf(home) != problem.NodeOf(to);
      (*rows)[home].sent[is_between] += last - start;
      (*rows)[to].received[is_between] += last - start;
    }
  };
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto rank = static_cast<int32_t>(r);
    for (const Piece& piece : ranks[r]) {
      work[r] += problem.Work(piece);
      move(piece.document, piece.start, piece.end, rank, &queries);
    }
    problem.ForEachNeed(ranks[r], [&](int32_t document, int64_t first, int64_t last) {
      move(document, first, last, rank, &keys);
    });
  }
  int64_t slowest = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    Wide time = work[r];
    if (!problem.speeds.empty()) {
      const int64_t fastest = *std::max_element(problem.speeds.begin(), problem.speeds.end());
      time = time * fastest / problem.speeds[r];
    }
    time += problem.Waits(static_cast<int64_t>(time), keys[r].Times(problem.key_time),
                          queries[r].Times(problem.query_time));
    slowest = std::max(slowest, static_cast<int64_t>(time));
  }
  return slowest;
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

// `part`: divides the candidates to consider.
std::pair<Badness, RankPieces> BestOfTwo(const QueryProblem& problem, int64_t part = 1) {
  // Candidates to consider, in all.
  const int64_t num_steps = std::min<int64_t>(10'000 + 1000 * problem.num_ranks, 400'000) / part;
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

// Ranks with more work than the tolerance allows move fewer rows: searches what takes least time.
RankPieces PlanByTime(const QueryProblem& problem) {
  RankPieces best = Plan(problem);
  if (problem.num_ranks == 1) return best;
  int64_t least = SlowestTime(problem, best);
  const auto time_with = [&](int64_t tolerance_ppm) {
    QueryProblem other = problem;
    other.tolerance_ppm = tolerance_ppm;
    RankPieces ranks = BestOfTwo(other, kPartOfSearch).second;
    if (!HaveRoom(problem, ranks)) return problem.kNoLimit;
    const int64_t time = SlowestTime(problem, ranks);
    if (time < least) least = time, best = std::move(ranks);
    return time;
  };
  // Large ones are found soonest.
  int64_t last = problem.kNoLimit;
  for (int64_t ppm = kMostTolerance; ppm > problem.tolerance_ppm; ppm /= 2) {
    const int64_t time = time_with(ppm);
    if (time > last) {
      for (int64_t between : {ppm / 2 * 3, ppm * 3}) time_with(between);
      break;
    }
    last = time;
  }
  return best;
}

}  // namespace

RankPieces MoveQueries(QueryProblem problem) {
  QueryProblem without = problem;
  without.max_queries = without.max_keys = QueryProblem::kNoLimit;
  RankPieces ranks = problem.CountsTime() ? PlanByTime(without) : Plan(without);
  if (HaveRoom(problem, ranks)) return ranks;
  return problem.CountsTime() ? PlanByTime(problem) : Plan(problem);
}

}  // namespace cpd
