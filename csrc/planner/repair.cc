// Brings ranks with too much work below the limit by exchanging pieces.
#include "planner/repair.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace cpd {
namespace {

constexpr int64_t kPieces = 14;     // pieces of a rank to consider
constexpr int64_t kRanks = 96;      // ranks below the limit to consider
constexpr int64_t kShiftRanks = 8;  // the same if a tail has to be cut
constexpr size_t kShiftPieces = 8;
constexpr int64_t kSteps = 8;       // steps for each rank above the limit, and
constexpr int64_t kMoreSteps = 24;  // additional steps in total
constexpr int64_t kCut = 32;        // extra cost of a cut, in keys
// Exchanges to consider for each rank of the problem. Repairs that succeed need a small part of
// them; where documents may be cut at multiples of a block alone, most repairs fail.
constexpr int64_t kConsidered = 1 << 16;
constexpr int64_t kConsideredOfBlocks = 1 << 12;

__extension__ typedef __int128 Wide;  // products of tokens and pairs

// One or two pieces of a rank.
struct Group {
  int64_t tokens = 0;
  int64_t work = 0;
  int64_t rows = 0;  // that its rank receives for it
  int first = -1;
  int second = -1;
  int cut = -1;  // the piece whose head moves with it: the longest other one that starts a document
};

struct Exchange {
  int64_t cost = 0;
  int64_t gain = 0;
  int64_t other = -1;
  Group out, in;

  // Fewer keys per unit of removed work.
  bool operator<(const Exchange& e) const {
    if (other < 0 || e.other < 0) return other >= 0 && e.other < 0;
    return static_cast<Wide>(cost) * e.gain < static_cast<Wide>(e.cost) * gain;
  }
};

class Repair {
 public:
  Repair(const PlacementProblem& problem, RankPieces* ranks) : problem_(problem), ranks_(*ranks) {
    work_.resize(ranks_.size());
    rows_.resize(ranks_.size());
    groups_.resize(ranks_.size());
    num_left_ = problem.num_ranks * (problem.block > 1 ? kConsideredOfBlocks : kConsidered);
    for (size_t r = 0; r < ranks_.size(); ++r) Count(static_cast<int64_t>(r));
  }

  void Run() {
    int64_t above = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) above += Room(static_cast<int64_t>(r)) < 0;
    for (int64_t step = 0; step < kSteps * above + kMoreSteps; ++step) {
      int64_t heavy = 0;
      for (int64_t r = 1; r < problem_.num_ranks; ++r) {
        if (Room(r) < Room(heavy)) heavy = r;
      }
      if (Room(heavy) >= 0 || num_left_ <= 0) return;
      const Exchange best = Find(heavy);
      if (best.other >= 0) {
        Apply(heavy, best);
      } else if (!ShiftTail(heavy)) {
        return;
      }
    }
  }

 private:
  // The rank has nothing else of the document, so the piece costs the same number of keys
  // elsewhere.
  static bool IsAlone(const std::vector<Piece>& pieces, int i) {
    for (int j = 0; j < static_cast<int>(pieces.size()); ++j) {
      if (j != i && pieces[j].document == pieces[i].document) return false;
    }
    return true;
  }

  // Work that the rank may still get.
  int64_t Room(int64_t rank) const { return problem_.limits[rank] - work_[rank]; }

  // Zero, one or two pieces, by their tokens.
  const std::vector<Group>& Groups(int64_t rank) {
    std::vector<Group>& groups = groups_[rank];
    if (groups.empty()) ListGroups(ranks_[rank], &groups);
    return groups;
  }

  void ListGroups(const std::vector<Piece>& pieces, std::vector<Group>* list) const {
    std::vector<Group>& groups = *list;
    groups.resize(1);
    for (int i = static_cast<int>(pieces.size()) - 1; i >= 0; --i) {
      if (!IsAlone(pieces, i)) continue;
      groups.push_back(
          {pieces[i].num_tokens(), problem_.Work(pieces[i]), Rows(pieces[i]), i, -1, -1});
    }
    // The longest pieces that start their documents: a group contains at most two of them.
    std::vector<int> heads;
    for (size_t g = 1; g < groups.size(); ++g) {
      const int i = groups[g].first;
      if (pieces[i].start == 0) heads.push_back(i);
    }
    const size_t num_heads = std::min<size_t>(3, heads.size());
    std::partial_sort(heads.begin(), heads.begin() + num_heads, heads.end(), [&](int a, int b) {
      return pieces[a].end != pieces[b].end ? pieces[a].end > pieces[b].end : a < b;
    });
    heads.resize(num_heads);
    std::sort(groups.begin() + 1, groups.end(), [](const Group& a, const Group& b) {
      return a.tokens != b.tokens ? a.tokens > b.tokens : a.first < b.first;
    });
    if (groups.size() > kPieces + 1) groups.resize(kPieces + 1);
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
  }

  Exchange Find(int64_t heavy) {
    const int64_t need = -Room(heavy);
    const std::vector<Group>& outs = Groups(heavy);
    Exchange best;
    const auto consider = [&](int64_t other, const Group& out, const Group& in) {
      --num_left_;
      const int64_t head = in.tokens - out.tokens;  // tokens that move there, or come back
      int64_t head_work = 0;
      if (head != 0) {
        const int cut = head > 0 ? out.cut : in.cut;
        if (cut < 0) return;
        const Piece& piece = ranks_[head > 0 ? heavy : other][cut];
        if (piece.end <= std::abs(head)) return;
        head_work = problem_.Work({0, std::abs(head), piece.document}) * (head > 0 ? 1 : -1);
      }
      const int64_t change = out.work - in.work + head_work;  // removed work
      if (change <= 0 || change > Room(other)) return;
      const Exchange found{std::abs(head) + kCut, std::min(change, need), other, out, in};
      if (found < best && KeepsLimits(heavy, found)) best = found;
    };
    // Whether an exchange with this head can be better than the best.
    int64_t most_gain = need;
    const auto can_win = [&](int64_t head) {
      return best.other < 0 ||
             static_cast<Wide>(head + kCut) * best.gain < static_cast<Wide>(best.cost) * most_gain;
    };
    for (int64_t other : Lightest(kRanks)) {
      if (num_left_ <= 0) break;
      if (other == heavy || Room(other) <= 0) continue;
      const std::vector<Group>& ins = Groups(other);
      most_gain = std::min(need, Room(other));
      auto middle = ins.begin();
      for (const Group& out : outs) {
        while (middle != ins.end() && middle->tokens < out.tokens) ++middle;
        for (auto in = middle; in != ins.end() && can_win(in->tokens - out.tokens); ++in) {
          consider(other, out, *in);
        }
        for (auto in = middle; in != ins.begin();) {
          --in;
          if (!can_win(out.tokens - in->tokens)) break;
          consider(other, out, *in);
        }
      }
    }
    return best;
  }

  void Apply(int64_t heavy, const Exchange& exchange) {
    Move(exchange, &ranks_[heavy], &ranks_[exchange.other]);
    Count(heavy);
    Count(exchange.other);
  }

  static void Move(const Exchange& exchange, std::vector<Piece>* mine, std::vector<Piece>* others) {
    const int64_t head = exchange.in.tokens - exchange.out.tokens;
    std::vector<Piece> to_mine, to_others;
    if (head > 0) CutHead(&(*mine)[exchange.out.cut], head, &to_others);
    if (head < 0) CutHead(&(*others)[exchange.in.cut], -head, &to_mine);
    Remove(mine, exchange.out, &to_others);
    Remove(others, exchange.in, &to_mine);
    mine->insert(mine->end(), to_mine.begin(), to_mine.end());
    others->insert(others->end(), to_others.begin(), to_others.end());
  }

  // Whether an exchange exceeds no capacity that was kept before, and cuts at multiples of a block.
  bool KeepsLimits(int64_t heavy, const Exchange& exchange) const {
    const int64_t head = exchange.in.tokens - exchange.out.tokens;
    if (head % problem_.block != 0) return false;
    if (!problem_.HasCapacity()) return true;
    // The giver of a head still receives its keys.
    const int64_t more = exchange.in.rows - exchange.out.rows;
    const auto grows = [&](int64_t rank, int64_t rows) {
      return rows > 0 && rows_[rank] + rows > problem_.max_received;
    };
    return !grows(heavy, more + std::max<int64_t>(0, -head)) &&
           !grows(exchange.other, std::max<int64_t>(0, head) - more);
  }

  int64_t Rows(const Piece& piece) const {
    return problem_.pairs.LastKey(piece.end, problem_.lengths[piece.document]) -
           problem_.pairs.FirstKey(piece.start);
  }

  // Rows by which one of two ranks exceeds its capacity.
  int64_t MostOverflow(std::vector<Piece> mine, std::vector<Piece> others) const {
    if (!problem_.HasCapacity()) return 0;
    const int64_t rows = std::max(ReceivedRows(problem_, &mine), ReceivedRows(problem_, &others));
    return std::max<int64_t>(0, rows - problem_.max_received);
  }

  void Count(int64_t rank) {
    groups_[rank].clear();
    work_[rank] = 0;
    for (const Piece& piece : ranks_[rank]) work_[rank] += problem_.Work(piece);
    std::vector<Piece> pieces = ranks_[rank];
    rows_[rank] = ReceivedRows(problem_, &pieces);
  }

  // Swaps the tail of a piece for the same number of tokens from the head of another, or of
  // padding: fewest keys per unit of removed work. Returns false if nothing helps.
  bool ShiftTail(int64_t heavy) {
    const int64_t need = -Room(heavy);
    Exchange best;
    std::vector<Piece> best_mine, best_others;
    for (int64_t other : Lightest(kShiftRanks)) {
      const int64_t room = Room(other);
      if (other == heavy || room <= 0) continue;
      const int64_t before = Keys(ranks_[heavy]) + Keys(ranks_[other]);
      const int64_t overflow = MostOverflow(ranks_[heavy], ranks_[other]);
      int64_t free = problem_.tokens_per_rank;
      for (const Piece& piece : ranks_[other]) free -= piece.num_tokens();
      for (size_t p : Largest(ranks_[heavy])) {
        const Piece& piece = ranks_[heavy][p];
        const auto consider = [&](size_t s, const Piece& source, int64_t most) {
          // Grows with the tokens until both cuts are at the same position of their documents.
          const auto gain = [&](int64_t num) {
            const int64_t leaves = problem_.Work({piece.end - num, piece.end, piece.document});
            if (source.document < 0) return leaves;
            return leaves - problem_.Work({source.start, source.start + num, source.document});
          };
          int64_t low = 1, high = most;
          if (high < 1 || gain(1) > room) return;
          const int64_t wanted = std::min(need, room);
          while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (gain(middle) >= wanted) {
              high = middle;
            } else {
              low = middle + 1;
            }
          }
          if (gain(low) > room) --low;
          low -= low % problem_.block;
          const int64_t change = gain(low);
          if (change <= 0) return;
          std::vector<Piece> mine = ranks_[heavy], others = ranks_[other];
          others.push_back({piece.end - low, piece.end, piece.document});
          CutOff(&mine, p, {piece.start, piece.end - low, piece.document});
          if (source.document >= 0) {
            mine.push_back({source.start, source.start + low, source.document});
            CutOff(&others, s, {source.start + low, source.end, source.document});
          }
          const int64_t cost = std::max<int64_t>(0, Keys(mine) + Keys(others) - before) + kCut;
          const Exchange found{cost, std::min(change, need), other, {}, {}};
          if (!(found < best)) return;
          if (MostOverflow(mine, others) > overflow) return;
          best = found;
          best_mine = std::move(mine), best_others = std::move(others);
        };
        consider(0, {0, 0, -1}, std::min(piece.num_tokens(), free));  // for padding
        for (size_t s : Largest(ranks_[other])) {
          const Piece& source = ranks_[other][s];
          consider(
              s, source,
              std::min({piece.num_tokens(), source.num_tokens(), (piece.end - source.start) / 2}));
        }
      }
    }
    if (best.other < 0) return false;
    ranks_[heavy] = std::move(best_mine), ranks_[best.other] = std::move(best_others);
    Count(heavy);
    Count(best.other);
    return true;
  }

  static void CutOff(std::vector<Piece>* pieces, size_t i, const Piece& rest) {
    (*pieces)[i] = rest;
    if (rest.num_tokens() == 0) pieces->erase(pieces->begin() + i);
  }

  int64_t Keys(std::vector<Piece> pieces) const { return ReceivedKeys(problem_, &pieces); }

  // The pieces with the most tokens, by index.
  static std::vector<size_t> Largest(const std::vector<Piece>& pieces) {
    std::vector<size_t> order(pieces.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    const size_t num = std::min<size_t>(kShiftPieces, order.size());
    std::partial_sort(order.begin(), order.begin() + num, order.end(), [&](size_t a, size_t b) {
      const int64_t x = pieces[a].num_tokens(), y = pieces[b].num_tokens();
      return x != y ? x > y : a < b;
    });
    order.resize(num);
    return order;
  }

  // The ranks with the most room for work.
  std::vector<int64_t> Lightest(int64_t num) const {
    std::vector<int64_t> light(ranks_.size());
    for (size_t r = 0; r < light.size(); ++r) light[r] = static_cast<int64_t>(r);
    num = std::min<int64_t>(num, light.size());
    std::partial_sort(
        light.begin(), light.begin() + num, light.end(),
        [this](int64_t a, int64_t b) { return Room(a) != Room(b) ? Room(a) > Room(b) : a < b; });
    light.resize(num);
    return light;
  }

  static void CutHead(Piece* piece, int64_t num, std::vector<Piece>* to) {
    to->push_back({0, num, piece->document});
    piece->start = num;
  }

  static void Remove(std::vector<Piece>* from, const Group& group, std::vector<Piece>* to) {
    for (int i : {std::max(group.first, group.second), std::min(group.first, group.second)}) {
      if (i < 0) continue;
      to->push_back((*from)[i]);
      from->erase(from->begin() + i);
    }
  }

  const PlacementProblem& problem_;
  RankPieces& ranks_;
  std::vector<int64_t> work_, rows_;        // of each rank
  std::vector<std::vector<Group>> groups_;  // of each rank; listed when they are needed
  int64_t num_left_ = 0;                    // exchanges that may still be considered
};

}  // namespace

void RepairBalance(const PlacementProblem& problem, RankPieces* ranks) {
  Repair(problem, ranks).Run();
}

}  // namespace cpd
