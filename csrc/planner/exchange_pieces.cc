// Searches the exchange of pieces with the fewest keys per unit of removed work.
#include "planner/exchange_pieces.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace cpd {
namespace {

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
  const size_t num = std::min(kGroupHeads, heads.size());
  std::partial_sort(heads.begin(), heads.begin() + num, heads.end(), [&](int a, int b) {
    return pieces[a].end != pieces[b].end ? pieces[a].end > pieces[b].end : a < b;
  });
  heads.resize(num);
  return heads;
}

}  // namespace

PieceExchange::PieceExchange(const PlacementProblem& problem, RankLoads* loads)
    : problem_(problem),
      loads_(*loads),
      groups_(problem.num_ranks),
      num_left_(problem.num_ranks * (problem.block > 1 ? kConsideredOfBlocks : kConsidered)) {}

bool PieceExchange::Apply(int64_t heavy) {
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

PieceExchange::Exchange PieceExchange::Find(int64_t heavy) {
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

void PieceExchange::Consider(int64_t heavy, const Exchange& exchange, Exchange* best) {
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
bool PieceExchange::KeepsLimits(int64_t heavy, const Exchange& exchange) const {
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

const std::vector<Group>& PieceExchange::Groups(int64_t rank) {
  if (groups_[rank].empty()) groups_[rank] = ListGroups(loads_.Pieces(rank));
  return groups_[rank];
}

// Zero, one or two pieces, by their tokens.
std::vector<Group> PieceExchange::ListGroups(const std::vector<Piece>& pieces) const {
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

}  // namespace cpd
