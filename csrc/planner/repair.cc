// Exchanges whole pieces, and cuts tails where that does not help.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/exchange_pieces.h"
#include "planner/placement_steps.h"
#include "planner/rank_loads.h"

namespace cpd {
namespace {

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
    const size_t num = std::min<size_t>(kPieces, order.size());
    std::partial_sort(order.begin(), order.begin() + num, order.end(), [&](size_t a, size_t b) {
      const int64_t x = pieces[a].num_tokens(), y = pieces[b].num_tokens();
      return x != y ? x > y : a < b;
    });
    order.resize(num);
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

void RepairBalance(const PlacementProblem& problem, RankPieces* ranks) {
  RankLoads loads(problem, ranks);
  PieceExchange exchange(problem, &loads);
  const int64_t num_steps = kSteps * loads.NumAbove() + kMoreSteps;
  for (int64_t step = 0; step < num_steps; ++step) {
    const int64_t heavy = loads.Heaviest();
    if (loads.Room(heavy) >= 0 || !exchange.IsOpen()) return;
    if (exchange.Apply(heavy)) continue;
    const int64_t other = ShiftTail(problem, heavy, &loads);
    if (other < 0) return;
    exchange.Forget(heavy);
    exchange.Forget(other);
  }
}

}  // namespace cpd
