// Brings ranks with too much work below the limit: exchanges whole pieces, and cuts tails where
// that does not help.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/placement.h"

namespace cpd {
namespace {

// ---- The ranks of a placement that is repaired, with the work and the received rows of each.

class RankLoads {
 public:
  RankLoads(const PlacementProblem& problem, RankPieces* ranks)
      : problem_(problem), ranks_(*ranks), work_(ranks->size()), rows_(ranks->size()) {
    for (size_t r = 0; r < ranks_.size(); ++r) Count(static_cast<int64_t>(r));
  }

  const std::vector<Piece>& Pieces(int64_t rank) const { return ranks_[rank]; }
  int64_t Rows(int64_t rank) const { return rows_[rank]; }
  // Work that the rank may still get; negative above its limit.
  int64_t Room(int64_t rank) const { return problem_.limits[rank] - work_[rank]; }

  // Ranks above the limit.
  int64_t NumAbove() const {
    int64_t above = 0;
    for (int64_t r = 0; r < problem_.num_ranks; ++r) above += Room(r) < 0;
    return above;
  }

  // The rank with the least room.
  int64_t Heaviest() const {
    int64_t heavy = 0;
    for (int64_t r = 1; r < problem_.num_ranks; ++r) {
      if (Room(r) < Room(heavy)) heavy = r;
    }
    return heavy;
  }

  // Up to `num` ranks with the most room.
  std::vector<int64_t> Lightest(int64_t num) const {
    std::vector<int64_t> light(ranks_.size());
    std::iota(light.begin(), light.end(), 0);
    KeepSmallest(&light, num, [this](int64_t rank) { return -Room(rank); });
    return light;
  }

  void Replace(int64_t rank, std::vector<Piece> pieces) {
    ranks_[rank] = std::move(pieces);
    Count(rank);
  }

 private:
  void Count(int64_t rank) {
    work_[rank] = problem_.WorkOf(ranks_[rank]);
    std::vector<Piece> pieces = ranks_[rank];
    rows_[rank] = ReceivedRows(problem_, &pieces);
  }

  const PlacementProblem& problem_;
  RankPieces& ranks_;
  std::vector<int64_t> work_, rows_;  // of each rank
};

// What an exchange of pieces costs in keys, and the work that it removes from a rank.
struct Price {
  static constexpr int64_t kCut = 32;  // extra cost of a cut, in keys

  int64_t cost = 0;
  int64_t gain = 0;  // 0: no exchange

  // Fewer keys per unit of removed work.
  bool operator<(const Price& other) const {
    if (gain == 0 || other.gain == 0) return gain > 0 && other.gain == 0;
    return static_cast<Wide>(cost) * other.gain < static_cast<Wide>(other.cost) * gain;
  }
};

// One or two pieces of a rank.
struct Group {
  int64_t tokens = 0;
  int64_t work = 0;
  int64_t rows = 0;  // that its rank receives for it
  int first = -1;
  int second = -1;
  int cut = -1;  // the piece whose head moves with it: the longest other one that starts a document
};

// ---- Searches the exchange of pieces with the fewest keys per unit of removed work.

constexpr int64_t kGroupPieces = 14;  // pieces of a rank to consider
constexpr size_t kGroupHeads = 3;  // pieces that may be cut: a group contains at most two of them
constexpr int64_t kPartners = 96;  // ranks below the limit to consider
// Exchanges to consider for each rank of the problem. Repairs that succeed need a small part of
// them; where documents may be cut at multiples of a block alone, most repairs fail.
constexpr int64_t kConsidered = 1 << 16;
constexpr int64_t kConsideredOfBlocks = 1 << 12;

// The rank has nothing else of the document, so the piece costs the same number of keys elsewhere.
bool IsAlone(const std::vector<Piece>& pieces, int i) {
  for (int j = 0; j < static_cast<int>(pieces.size()); ++j) {
    if (j != i && pieces[j].document == pieces[i].document) return false;
  }
  return true;
}

void CutHead(Piece* piece, int64_t num, std::vector<Piece>* to) {
  to->push_back({0, num, piece->document});
  piece->start = num;
}

void Remove(std::vector<Piece>* from, const Group& group, std::vector<Piece>* to) {
  for (int i : {std::max(group.first, group.second), std::min(group.first, group.second)}) {
    if (i < 0) continue;
    to->push_back((*from)[i]);
    from->erase(from->begin() + i);
  }
}

// The longest of the pieces of these groups that start their documents, by index.
std::vector<int> LongestHeads(const std::vector<Piece>& pieces, const std::vector<Group>& groups) {
  std::vector<int> heads;
  for (const Group& group : groups) {
    if (group.first >= 0 && pieces[group.first].start == 0) heads.push_back(group.first);
  }
  KeepSmallest(&heads, kGroupHeads, [&](int piece) { return -pieces[piece].end; });
  return heads;
}

class PieceExchange {
 public:
  PieceExchange(const PlacementProblem& problem, RankLoads* loads, int64_t num_considered)
      : problem_(problem),
        loads_(*loads),
        groups_(problem.num_ranks),
        num_left_(problem.num_ranks * num_considered) {}

  // Whether more exchanges may be considered.
  bool IsOpen() const { return num_left_ > 0; }
  // Exchanges equal numbers of tokens between `heavy` and a rank below the limit, with at most one
  // cut: fewest keys per unit of removed work. Returns whether that was possible.
  bool Apply(int64_t heavy) {
    const Exchange best = Find(heavy);
    if (best.other < 0) return false;
    std::vector<Piece> mine = loads_.Pieces(heavy), others = loads_.Pieces(best.other);
    const int64_t head = best.Head();
    std::vector<Piece> to_mine, to_others;
    if (head > 0) CutHead(&mine[best.out.cut], head, &to_others);
    if (head < 0) CutHead(&others[best.in.cut], -head, &to_mine);
    Remove(&mine, best.out, &to_others);
    Remove(&others, best.in, &to_mine);
    mine.insert(mine.end(), to_mine.begin(), to_mine.end());
    others.insert(others.end(), to_others.begin(), to_others.end());
    loads_.Replace(heavy, std::move(mine));
    loads_.Replace(best.other, std::move(others));
    Forget(heavy);
    Forget(best.other);
    return true;
  }

  // The pieces of the rank have changed.
  void Forget(int64_t rank) { groups_[rank].clear(); }

 private:
  struct Exchange {
    Price price;
    int64_t other = -1;
    Group out, in;

    int64_t Head() const { return in.tokens - out.tokens; }  // tokens that move there, or come back
  };

  Exchange Find(int64_t heavy) {
    const int64_t need = -loads_.Room(heavy);
    const std::vector<Group>& outs = Groups(heavy);
    Exchange best;
    // Whether an exchange with this head can be better than the best.
    int64_t most_gain = need;
    const auto can_win = [&](int64_t head) {
      return best.other < 0 || static_cast<Wide>(head + Price::kCut) * best.price.gain <
                                   static_cast<Wide>(best.price.cost) * most_gain;
    };
    for (int64_t other : loads_.Lightest(kPartners)) {
      if (!IsOpen()) break;
      if (other == heavy || loads_.Room(other) <= 0) continue;
      const std::vector<Group>& ins = Groups(other);
      most_gain = std::min(need, loads_.Room(other));
      auto middle = ins.begin();
      for (const Group& out : outs) {
        while (middle != ins.end() && middle->tokens < out.tokens) ++middle;
        for (auto in = middle; in != ins.end() && can_win(in->tokens - out.tokens); ++in) {
          Consider(heavy, {{}, other, out, *in}, &best);
        }
        for (auto in = middle; in != ins.begin();) {
          --in;
          if (!can_win(out.tokens - in->tokens)) break;
          Consider(heavy, {{}, other, out, *in}, &best);
        }
      }
    }
    return best;
  }

  void Consider(int64_t heavy, const Exchange& exchange, Exchange* best) {
    --num_left_;
    const Group &out = exchange.out, &in = exchange.in;
    const int64_t head = exchange.Head();
    int64_t head_work = 0;
    if (head != 0) {
      const int cut = head > 0 ? out.cut : in.cut;
      if (cut < 0) return;
      const Piece& piece = loads_.Pieces(head > 0 ? heavy : exchange.other)[cut];
      if (piece.end <= std::abs(head)) return;
      head_work = problem_.Work({0, std::abs(head), piece.document}) * (head > 0 ? 1 : -1);
    }
    const int64_t change = out.work - in.work + head_work;  // removed work
    if (change <= 0 || change > loads_.Room(exchange.other)) return;
    const Price price{std::abs(head) + Price::kCut, std::min(change, -loads_.Room(heavy))};
    if (!(price < best->price) || !KeepsLimits(heavy, exchange)) return;
    *best = exchange;
    best->price = price;
  }

  // Whether an exchange exceeds no capacity that was kept before, and cuts at multiples of a block.
  bool KeepsLimits(int64_t heavy, const Exchange& exchange) const {
    const int64_t head = exchange.Head();
    if (head % problem_.block != 0) return false;
    if (!problem_.HasCapacity()) return true;
    // The giver of a head still receives its keys.
    const int64_t more = exchange.in.rows - exchange.out.rows;
    const auto grows = [&](int64_t rank, int64_t rows) {
      return rows > 0 && loads_.Rows(rank) + rows > problem_.max_received;
    };
    return !grows(heavy, more + std::max<int64_t>(0, -head)) &&
           !grows(exchange.other, std::max<int64_t>(0, head) - more);
  }

  const std::vector<Group>& Groups(int64_t rank) {
    if (groups_[rank].empty()) groups_[rank] = ListGroups(loads_.Pieces(rank));
    return groups_[rank];
  }

  // Zero, one or two pieces, by their tokens.
  std::vector<Group> ListGroups(const std::vector<Piece>& pieces) const {
    std::vector<Group> groups(1);
    for (int i = static_cast<int>(pieces.size()) - 1; i >= 0; --i) {
      if (!IsAlone(pieces, i)) continue;
      const Piece& piece = pieces[i];
      groups.push_back({piece.num_tokens(), problem_.Work(piece), problem_.Rows(piece), i, -1, -1});
    }
    const std::vector<int> heads = LongestHeads(pieces, groups);
    std::sort(groups.begin() + 1, groups.end(), [](const Group& a, const Group& b) {
      return a.tokens != b.tokens ? a.tokens > b.tokens : a.first < b.first;
    });
    if (groups.size() > kGroupPieces + 1) groups.resize(kGroupPieces + 1);
    const size_t num = groups.size();
    for (size_t i = 1; i < num; ++i) {
      for (size_t j = i + 1; j < num; ++j) {
        const Group &a = groups[i], &b = groups[j];
        groups.push_back(
            {a.tokens + b.tokens, a.work + b.work, a.rows + b.rows, a.first, b.first, -1});
      }
    }
    for (Group& group : groups) {
      for (int i : heads) {
        if (i == group.first || i == group.second) continue;
        group.cut = i;
        break;
      }
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const Group& a, const Group& b) { return a.tokens < b.tokens; });
    return groups;
  }

  const PlacementProblem& problem_;
  RankLoads& loads_;
  std::vector<std::vector<Group>> groups_;  // of each rank; listed when they are needed
  int64_t num_left_ = 0;                    // exchanges that may still be considered
};

// ---- Cuts tails where an exchange does not help.

constexpr int64_t kSteps = 8;       // for each rank above the limit, and
constexpr int64_t kMoreSteps = 24;  // additional steps in total

// Swaps the tail of a piece of a rank above the limit for the head of a piece of a rank below it:
// the fewest keys per unit of removed work.
class TailShift {
 public:
  static constexpr int64_t kRanks = 8;  // ranks below the limit to consider

  TailShift(const PlacementProblem& problem, int64_t heavy, const RankLoads& loads)
      : problem_(problem), loads_(loads), heavy_(heavy), need_(-loads.Room(heavy)) {}

  void ConsiderRank(int64_t other) {
    other_ = other;
    room_ = loads_.Room(other);
    keys_before_ = Keys(loads_.Pieces(heavy_)) + Keys(loads_.Pieces(other));
    overflow_before_ = MostOverflow(loads_.Pieces(heavy_), loads_.Pieces(other));
    int64_t free = problem_.tokens_per_rank;
    for (const Piece& piece : loads_.Pieces(other)) free -= piece.num_tokens();
    const std::vector<size_t> sources = Largest(loads_.Pieces(other));
    for (size_t p : Largest(loads_.Pieces(heavy_))) {
      const Piece& piece = loads_.Pieces(heavy_)[p];
      Consider(p, 0, {0, 0, kPadding}, std::min(piece.num_tokens(), free));
      for (size_t s : sources) {
        const Piece& source = loads_.Pieces(other)[s];
        const int64_t between = (piece.end - source.start) / 2;
        Consider(p, s, source, std::min({piece.num_tokens(), source.num_tokens(), between}));
      }
    }
  }

  int64_t Apply(RankLoads* loads) {
    if (best_.gain == 0) return -1;
    loads->Replace(heavy_, std::move(best_mine_));
    loads->Replace(best_other_, std::move(best_others_));
    return best_other_;
  }

 private:
  static constexpr size_t kPieces = 8;     // pieces of a rank to consider
  static constexpr int32_t kPadding = -1;  // the document of tokens that have no work

  // Swaps up to `most` tokens of piece p of the rank for those of `source`, piece s of the other.
  void Consider(size_t p, size_t s, const Piece& source, int64_t most) {
    const Piece& piece = loads_.Pieces(heavy_)[p];
    if (most < 1 || Gain(piece, source, 1) > room_) return;
    int64_t tokens = FewestTokens(piece, source, most);
    if (Gain(piece, source, tokens) > room_) --tokens;
    tokens -= tokens % problem_.block;
    const int64_t change = Gain(piece, source, tokens);
    if (change <= 0) return;
    std::vector<Piece> mine = loads_.Pieces(heavy_), others = loads_.Pieces(other_);
    others.push_back({piece.end - tokens, piece.end, piece.document});
    CutOff(&mine, p, {piece.start, piece.end - tokens, piece.document});
    if (source.document != kPadding) {
      mine.push_back({source.start, source.start + tokens, source.document});
      CutOff(&others, s, {source.start + tokens, source.end, source.document});
    }
    const int64_t more_keys = Keys(mine) + Keys(others) - keys_before_;
    const Price found{std::max<int64_t>(0, more_keys) + Price::kCut, std::min(change, need_)};
    if (!(found < best_) || MostOverflow(mine, others) > overflow_before_) return;
    best_ = found, best_other_ = other_;
    best_mine_ = std::move(mine), best_others_ = std::move(others);
  }

  // The work that leaves the rank with so many tokens. It grows with them until both cuts are at
  // the same position of their documents.
  int64_t Gain(const Piece& piece, const Piece& source, int64_t tokens) const {
    const int64_t leaves = problem_.Work({piece.end - tokens, piece.end, piece.document});
    if (source.document == kPadding) return leaves;
    return leaves - problem_.Work({source.start, source.start + tokens, source.document});
  }

  // The fewest tokens, at most `most`, with the wanted gain.
  int64_t FewestTokens(const Piece& piece, const Piece& source, int64_t most) const {
    const int64_t wanted = std::min(need_, room_);
    return FirstThat(1, most, [&](int64_t x) { return Gain(piece, source, x) >= wanted; });
  }

  int64_t Keys(std::vector<Piece> pieces) const { return ReceivedKeys(problem_, &pieces); }

  // Rows by which one of two ranks exceeds its capacity.
  int64_t MostOverflow(std::vector<Piece> mine, std::vector<Piece> others) const {
    if (!problem_.HasCapacity()) return 0;
    const int64_t rows = std::max(ReceivedRows(problem_, &mine), ReceivedRows(problem_, &others));
    return std::max<int64_t>(0, rows - problem_.max_received);
  }

  static void CutOff(std::vector<Piece>* pieces, size_t i, const Piece& rest) {
    (*pieces)[i] = rest;
    if (rest.num_tokens() == 0) pieces->erase(pieces->begin() + i);
  }

  // The pieces with the most tokens, by index.
  static std::vector<size_t> Largest(const std::vector<Piece>& pieces) {
    std::vector<size_t> order(pieces.size());
    std::iota(order.begin(), order.end(), 0);
    KeepSmallest(&order, kPieces, [&](size_t piece) { return -pieces[piece].num_tokens(); });
    return order;
  }

  const PlacementProblem& problem_;
  const RankLoads& loads_;
  const int64_t heavy_, need_;
  int64_t other_ = -1, room_ = 0, keys_before_ = 0, overflow_before_ = 0;  // of `ConsiderRank`
  Price best_;
  int64_t best_other_ = -1;
  std::vector<Piece> best_mine_, best_others_;
};

// Returns the rank below the limit, or -1: nothing helps.
int64_t ShiftTail(const PlacementProblem& problem, int64_t heavy, RankLoads* loads) {
  TailShift shift(problem, heavy, *loads);
  for (int64_t other : loads->Lightest(TailShift::kRanks)) {
    if (other != heavy && loads->Room(other) > 0) shift.ConsiderRank(other);
  }
  return shift.Apply(loads);
}

}  // namespace

void RepairBalance(const PlacementProblem& problem, RankPieces* ranks, bool may_shift) {
  RankLoads loads(problem, ranks);
  const bool is_short = problem.block > 1 || !may_shift;
  PieceExchange exchange(problem, &loads, is_short ? kConsideredOfBlocks : kConsidered);
  const int64_t num_steps = kSteps * loads.NumAbove() + kMoreSteps;
  for (int64_t step = 0; step < num_steps; ++step) {
    const int64_t heavy = loads.Heaviest();
    if (loads.Room(heavy) >= 0 || !exchange.IsOpen()) return;
    if (exchange.Apply(heavy)) continue;
    const int64_t other = may_shift ? ShiftTail(problem, heavy, &loads) : -1;
    if (other < 0) return;
    exchange.Forget(heavy);
    exchange.Forget(other);
  }
}

}  // namespace cpd
