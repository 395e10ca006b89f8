// A construction of placements that reaches the work limit, whatever it costs in keys.
#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "planner/placement_steps.h"

namespace cpd {
namespace {

struct Item {
  Piece piece;
  int64_t work = 0;

  bool operator<(const Item& other) const {  // by work per token
    const Wide x = static_cast<Wide>(work) * other.piece.num_tokens();
    const Wide y = static_cast<Wide>(other.work) * piece.num_tokens();
    if (x != y) return x < y;
    if (piece.document != other.piece.document) return piece.document < other.piece.document;
    return piece.start < other.piece.start;
  }
};

class Mixer {
 public:
  Mixer(const PlacementProblem& problem, const std::vector<Piece>& items) : problem_(problem) {
    padding_ = problem.num_ranks * problem.tokens_per_rank;
    for (const Piece& piece : items) {
      padding_ -= piece.num_tokens();
      // Within an item, the work of a token only grows, stays or falls.
      int64_t start = piece.start;
      for (int64_t turn : problem.Turns(piece.document)) {
        const int64_t end = std::clamp(turn, start, piece.end);
        Insert({start, end, piece.document});
        start = end;
      }
      Insert({start, piece.end, piece.document});
    }
    ranks_.resize(problem.num_ranks);
  }

  RankPieces Run() {
    std::vector<int32_t> order(problem_.num_ranks);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return problem_.speeds[a] < problem_.speeds[b]; });
    for (size_t i = 0; i + 1 < order.size(); ++i) {
      const int64_t limit = problem_.limits[order[i]];
      int64_t low = 0, high = std::min(problem_.tokens_per_rank, tokens_left_);
      while (low < high) {  // the most dense tokens that the limit allows
        const int64_t middle = high - (high - low) / 2;
        if (WorkOfDensest(middle) + WorkOfLightest(problem_.tokens_per_rank - middle) <= limit) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      Close(low, &ranks_[order[i]]);
    }
    for (const Item& item : items_) ranks_[order.back()].push_back(item.piece);
    return std::move(ranks_);
  }

 private:
  void Insert(const Piece& piece) {
    if (piece.num_tokens() <= 0) return;
    items_.insert({piece, problem_.Work(piece)});
    tokens_left_ += piece.num_tokens();
  }

  // Splits tokens off: the densest ones, or the lightest.
  Piece CutOff(int64_t num, bool is_dense, Piece* piece) const {
    const auto density = [&](int64_t at) { return problem_.Work({at, at + 1, piece->document}); };
    const bool is_falling = density(piece->start) > density(piece->end - 1);
    Piece part = *piece;
    if (is_dense != is_falling) {
      part.start = piece->end = piece->end - num;
    } else {
      part.end = piece->start = piece->start + num;
    }
    return part;
  }

  // The work of the first items, of this many tokens.
  template <typename Iterator>
  int64_t WorkOf(Iterator item, Iterator end, int64_t num, bool is_dense) const {
    int64_t work = 0;
    for (; num > 0 && item != end; ++item) {
      Piece piece = item->piece;
      const int64_t used = std::min(num, piece.num_tokens());
      work +=
          used == piece.num_tokens() ? item->work : problem_.Work(CutOff(used, is_dense, &piece));
      num -= used;
    }
    return work;
  }

  int64_t WorkOfDensest(int64_t num) const {
    return WorkOf(items_.rbegin(), items_.rend(), num, true);
  }
  int64_t WorkOfLightest(int64_t num) const {
    return WorkOf(items_.begin(), items_.end(), num - std::min(num, padding_), false);
  }

  // Gives a rank this many of the densest tokens, and the lightest ones.
  void Close(int64_t num_dense, std::vector<Piece>* pieces) {
    int64_t room = problem_.tokens_per_rank - num_dense;
    const int64_t pad = std::min(room, padding_);
    padding_ -= pad, room -= pad;
    std::vector<Piece> rests;  // inserted at the end: their order may differ
    const auto take = [&](bool is_dense, int64_t num) {
      while (num > 0 && !items_.empty()) {
        const auto item = is_dense ? std::prev(items_.end()) : items_.begin();
        Piece piece = item->piece;
        items_.erase(item);
        tokens_left_ -= piece.num_tokens();
        const int64_t used = std::min(num, piece.num_tokens());
        pieces->push_back(CutOff(used, is_dense, &piece));
        if (piece.num_tokens() > 0) rests.push_back(piece);
        num -= used;
      }
      return num;
    };
    room += take(true, num_dense);
    int64_t missing = take(false, room);
    while (missing > 0 && !rests.empty()) {  // both ends of one item
      Piece& rest = rests.back();
      const int64_t used = std::min(missing, rest.num_tokens());
      pieces->push_back(CutOff(used, false, &rest));
      missing -= used;
      if (rest.num_tokens() == 0) rests.pop_back();
    }
    for (const Piece& rest : rests) Insert(rest);
  }

  const PlacementProblem& problem_;
  std::set<Item> items_;
  int64_t tokens_left_ = 0, padding_ = 0;
  RankPieces ranks_;
};

constexpr int64_t kMostSwaps = 64;

// The tokens of a rank as pieces of one token each; padding of no work.
std::vector<Item> TokensOf(const PlacementProblem& problem, const std::vector<Piece>& pieces) {
  std::vector<Item> tokens;
  for (const Piece& piece : pieces) {
    for (int64_t start = piece.start; start < piece.end; ++start) {
      const Piece one{start, start + 1, piece.document};
      tokens.push_back({one, problem.Work(one)});
    }
  }
  tokens.resize(problem.tokens_per_rank);
  return tokens;
}

}  // namespace

RankPieces MixDensities(const PlacementProblem& problem, const std::vector<Piece>& items) {
  return Mixer(problem, items).Run();
}

void SwapTokens(const PlacementProblem& problem, RankPieces* ranks) {
  const size_t num_ranks = ranks->size();
  if (problem.tokens_per_rank * static_cast<int64_t>(num_ranks) > problem.kFewTokens) return;
  std::vector<std::vector<Item>> tokens;
  std::vector<int64_t> above;  // work of each rank above its limit
  for (size_t r = 0; r < num_ranks; ++r) {
    tokens.push_back(TokensOf(problem, (*ranks)[r]));
    above.push_back(-problem.limits[r]);
    for (const Item& token : tokens[r]) above[r] += token.work;
  }
  for (int64_t swaps = 0; swaps < kMostSwaps; ++swaps) {
    const size_t heavy = std::max_element(above.begin(), above.end()) - above.begin();
    int64_t least = above[heavy];
    if (least <= 0) break;
    Item *out = nullptr, *in = nullptr;
    size_t other = heavy;
    for (size_t r = 0; r < num_ranks; ++r) {
      if (r == heavy) continue;
      for (Item& mine : tokens[heavy]) {
        for (Item& theirs : tokens[r]) {
          const int64_t moved = mine.work - theirs.work;
          const int64_t most = std::max(above[heavy] - moved, above[r] + moved);
          if (most < least) least = most, other = r, out = &mine, in = &theirs;
        }
      }
    }
    if (out == nullptr) break;
    above[heavy] -= out->work - in->work, above[other] += out->work - in->work;
    std::swap(*out, *in);
  }
  for (size_t r = 0; r < num_ranks; ++r) {
    (*ranks)[r].clear();
    for (const Item& token : tokens[r]) {
      if (token.piece.num_tokens() > 0) (*ranks)[r].push_back(token.piece);
    }
    SortAndJoin(&(*ranks)[r]);
  }
}

}  // namespace cpd
