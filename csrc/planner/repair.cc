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

__extension__ typedef __int128 Wide;  // products of tokens and pairs

// One or two pieces of a rank.
struct Group {
  int64_t tokens = 0;
  int64_t work = 0;
  int first = -1;
  int second = -1;
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
  Repair(const PlacementProblem& problem, RankPieces* ranks)
      : problem_(problem), ranks_(*ranks), limit_(WorkLimit(problem)) {
    work_.resize(ranks_.size());
    for (size_t r = 0; r < ranks_.size(); ++r) CountWork(static_cast<int64_t>(r));
  }

  void Run() {
    const int64_t above =
        std::count_if(work_.begin(), work_.end(), [this](int64_t work) { return work > limit_; });
    for (int64_t step = 0; step < kSteps * above + kMoreSteps; ++step) {
      const int64_t heavy = std::max_element(work_.begin(), work_.end()) - work_.begin();
      if (work_[heavy] <= limit_) return;
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

  // Zero, one or two pieces.
  std::vector<Group> Groups(int64_t rank) const {
    const std::vector<Piece>& pieces = ranks_[rank];
    std::vector<Group> groups(1);
    for (int i = static_cast<int>(pieces.size()) - 1; i >= 0; --i) {
      if (!IsAlone(pieces, i)) continue;
      const int64_t work = problem_.pairs(pieces[i].start, pieces[i].end);
      groups.push_back({pieces[i].num_tokens(), work, i, -1});
    }
    std::sort(groups.begin() + 1, groups.end(), [](const Group& a, const Group& b) {
      return a.tokens != b.tokens ? a.tokens > b.tokens : a.first < b.first;
    });
    if (groups.size() > kPieces + 1) groups.resize(kPieces + 1);
    const size_t num = groups.size();
    for (size_t i = 1; i < num; ++i) {
      for (size_t j = i + 1; j < num; ++j) {
        const Group &a = groups[i], &b = groups[j];
        groups.push_back({a.tokens + b.tokens, a.work + b.work, a.first, b.first});
      }
    }
    return groups;
  }

  // The piece whose head moves: the longest that stays and starts its document.
  int64_t Longest(int64_t rank, const Group& leaves) const {
    int64_t longest = -1;
    const std::vector<Piece>& pieces = ranks_[rank];
    for (int i = 0; i < static_cast<int>(pieces.size()); ++i) {
      if (i == leaves.first || i == leaves.second || pieces[i].start > 0) continue;
      if (!IsAlone(pieces, i)) continue;
      if (longest < 0 || pieces[i].end > pieces[longest].end) longest = i;
    }
    return longest;
  }

  Exchange Find(int64_t heavy) const {
    const int64_t need = work_[heavy] - limit_;
    const std::vector<Group> outs = Groups(heavy);
    Exchange best;
    for (int64_t other : Lightest(kRanks)) {
      if (other == heavy || work_[other] >= limit_) continue;
      for (const Group& in : Groups(other)) {
        for (const Group& out : outs) {
          const int64_t head = in.tokens - out.tokens;  // tokens that move there, or come back
          const int64_t head_work = head >= 0 ? problem_.pairs(head) : -problem_.pairs(-head);
          const int64_t change = out.work - in.work + head_work;  // removed work
          if (change <= 0 || work_[other] + change > limit_) continue;
          const Exchange found{std::abs(head) + kCut, std::min(change, need), other, out, in};
          if (!(found < best)) continue;
          if (head != 0) {
            const int64_t giver = head > 0 ? heavy : other;
            const int64_t cut = Longest(giver, head > 0 ? out : in);
            if (cut < 0 || ranks_[giver][cut].end <= std::abs(head)) continue;
          }
          best = found;
        }
      }
    }
    return best;
  }

  void Apply(int64_t heavy, const Exchange& exchange) {
    std::vector<Piece>& mine = ranks_[heavy];
    std::vector<Piece>& others = ranks_[exchange.other];
    const int64_t head = exchange.in.tokens - exchange.out.tokens;
    std::vector<Piece> to_mine, to_others;
    if (head > 0) CutHead(&mine[Longest(heavy, exchange.out)], head, &to_others);
    if (head < 0) CutHead(&others[Longest(exchange.other, exchange.in)], -head, &to_mine);
    Remove(&mine, exchange.out, &to_others);
    Remove(&others, exchange.in, &to_mine);
    mine.insert(mine.end(), to_mine.begin(), to_mine.end());
    others.insert(others.end(), to_others.begin(), to_others.end());
    CountWork(heavy);
    CountWork(exchange.other);
  }

  void CountWork(int64_t rank) {
    work_[rank] = 0;
    for (const Piece& piece : ranks_[rank]) work_[rank] += problem_.pairs(piece.start, piece.end);
  }

  // Swaps the tail of a piece for the same number of tokens from the head of another, or of
  // padding: fewest keys per unit of removed work. Returns false if nothing helps.
  bool ShiftTail(int64_t heavy) {
    const int64_t need = work_[heavy] - limit_;
    Exchange best;
    std::vector<Piece> best_mine, best_others;
    for (int64_t other : Lightest(kShiftRanks)) {
      const int64_t room = limit_ - work_[other];
      if (other == heavy || room <= 0) continue;
      const int64_t before = Keys(ranks_[heavy]) + Keys(ranks_[other]);
      int64_t free = problem_.tokens_per_rank;
      for (const Piece& piece : ranks_[other]) free -= piece.num_tokens();
      for (size_t p : Largest(ranks_[heavy])) {
        const Piece& piece = ranks_[heavy][p];
        const auto consider = [&](size_t s, const Piece& source, int64_t most) {
          // Grows with the tokens until both cuts are at the same position of their documents.
          const auto gain = [&](int64_t num) {
            const int64_t comes = problem_.pairs(source.start, source.start + num);
            return problem_.pairs(piece.end - num, piece.end) - (source.document < 0 ? 0 : comes);
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
    CountWork(heavy);
    CountWork(best.other);
    return true;
  }

  static void CutOff(std::vector<Piece>* pieces, size_t i, const Piece& rest) {
    (*pieces)[i] = rest;
    if (rest.num_tokens() == 0) pieces->erase(pieces->begin() + i);
  }

  int64_t Keys(std::vector<Piece> pieces) const { return ReceivedKeys(problem_.pairs, &pieces); }

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

  // The ranks with the least work.
  std::vector<int64_t> Lightest(int64_t num) const {
    std::vector<int64_t> light(ranks_.size());
    for (size_t r = 0; r < light.size(); ++r) light[r] = static_cast<int64_t>(r);
    num = std::min<int64_t>(num, light.size());
    std::partial_sort(light.begin(), light.begin() + num, light.end(),
                      [this](int64_t a, int64_t b) {
                        return work_[a] != work_[b] ? work_[a] < work_[b] : a < b;
                      });
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
  const int64_t limit_;
  std::vector<int64_t> work_;
};

}  // namespace

void RepairBalance(const PlacementProblem& problem, RankPieces* ranks) {
  Repair(problem, ranks).Run();
}

}  // namespace cpd
