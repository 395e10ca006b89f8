// Places the tokens of packed documents on ranks: costs, nodes, constructions, and the choice.
#include "planner/placement.h"

#include <numeric>
#include <set>
#include <utility>

namespace cpd {

// ---- What a placement costs: rows above the capacity, work above the limits, keys that move.
std::vector<Overflow> ListOverflows(const PlacementProblem& problem, const RankPieces& ranks) {
  std::vector<Overflow> overflows;
  for (const std::vector<Piece>& pieces : ranks) {
    int64_t rows = 0, most = 0;
    int32_t document = 0;
    problem.ForEachNeed(pieces, [&](int32_t of, int64_t first, int64_t last) {
      rows += last - first;
      if (last - first > most) most = last - first, document = of;
    });
    if (rows > problem.max_received) overflows.push_back({document, rows - problem.max_received});
  }
  return overflows;
}

std::vector<int64_t> WorkLimits(int64_t total, const std::vector<int64_t>& speeds,
                                int64_t tolerance_ppm) {
  const Wide speed = std::accumulate(speeds.begin(), speeds.end(), static_cast<int64_t>(0));
  constexpr int64_t kMillion = 1'000'000;
  std::vector<int64_t> limits;
  for (int64_t s : speeds) {
    const auto share = static_cast<int64_t>(static_cast<Wide>(total) * s / speed);
    limits.push_back(share + share / kMillion * tolerance_ppm +
                     share % kMillion * tolerance_ppm / kMillion);
  }
  return limits;
}

void SetLimits(PlacementProblem* problem) {
  int64_t total = 0;
  for (size_t d = 0; d < problem->lengths.size(); ++d) {
    total += problem->Work({0, problem->lengths[d], static_cast<int32_t>(d)});
  }
  if (problem->speeds.empty()) problem->speeds.assign(problem->num_ranks, 1);
  problem->fastest_speed = *std::max_element(problem->speeds.begin(), problem->speeds.end());
  problem->limits = WorkLimits(total, problem->speeds, problem->tolerance_ppm);
}

void SortAndJoin(std::vector<Piece>* pieces) {
  std::sort(pieces->begin(), pieces->end(), [](const Piece& a, const Piece& b) {
    return a.document != b.document ? a.document < b.document : a.start < b.start;
  });
  size_t last = 0;
  for (size_t i = 1; i < pieces->size(); ++i) {
    Piece& before = (*pieces)[last];
    const Piece& piece = (*pieces)[i];
    if (piece.document == before.document && piece.start == before.end) {
      before.end = piece.end;
    } else {
      (*pieces)[++last] = piece;
    }
  }
  if (!pieces->empty()) pieces->resize(last + 1);
}

int64_t ReceivedRows(const PlacementProblem& problem, std::vector<Piece>* pieces) {
  SortAndJoin(pieces);
  int64_t rows = 0;
  problem.ForEachNeed(*pieces, [&](int32_t, int64_t first, int64_t last) { rows += last - first; });
  return rows;
}

int64_t ReceivedKeys(const PlacementProblem& problem, std::vector<Piece>* pieces) {
  int64_t keys = ReceivedRows(problem, pieces);
  for (const Piece& piece : *pieces) keys -= piece.num_tokens();
  return keys;
}

std::vector<Traffic> ListTraffic(const PlacementProblem& problem, const RankPieces& ranks) {
  struct Held {
    Piece piece;
    int32_t rank;
  };
  std::vector<Held> held;  // only of cut documents: whole ones do not move
  std::vector<char> is_cut(problem.lengths.size(), 0);
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const Piece& piece : ranks[r]) {
      if (piece.num_tokens() == problem.lengths[piece.document]) continue;
      held.push_back({piece, static_cast<int32_t>(r)});
      is_cut[piece.document] = 1;
    }
  }
  const auto before = [](const Held& a, const Held& b) {
    return a.piece.document != b.piece.document ? a.piece.document < b.piece.document
                                                : a.piece.start < b.piece.start;
  };
  std::sort(held.begin(), held.end(), before);
  std::vector<Traffic> traffic;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto target = static_cast<int32_t>(r);
    std::vector<Piece> mine = ranks[r];
    SortAndJoin(&mine);
    problem.ForEachNeed(mine, [&](int32_t document, int64_t first, int64_t last) {
      if (!is_cut[document]) return;
      auto from =
          std::upper_bound(held.begin(), held.end(), Held{{first, first, document}, 0}, before);
      for (--from;
           from != held.end() && from->piece.document == document && from->piece.start < last;
           ++from) {
        const int64_t keys = std::min(from->piece.end, last) - std::max(from->piece.start, first);
        if (from->rank != target && keys > 0) traffic.push_back({from->rank, target, keys});
      }
    });
  }
  return traffic;
}

std::vector<LinkRows> ListLinks(const PlacementProblem& problem, const RankPieces& ranks) {
  std::vector<LinkRows> links(ranks.size());
  for (const Traffic& x : ListTraffic(problem, ranks)) {
    const bool is_between = problem.NodeOf(x.source) != problem.NodeOf(x.target);
    links[x.source].sent[is_between] += x.keys;
    links[x.target].received[is_between] += x.keys;
  }
  return links;
}

PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks) {
  PlacementCost cost;
  RankPieces sorted = ranks;
  std::vector<LinkRows> links(ranks.size());
  if (problem.CountsTime() || problem.HasNodes()) links = ListLinks(problem, ranks);
  for (size_t r = 0; r < sorted.size(); ++r) {
    const int64_t work = problem.WorkOf(sorted[r]);
    // A slow rank takes longer for the same excess.
    const Wide above = work - problem.limits[r];
    const auto late = static_cast<int64_t>(above * problem.fastest_speed / problem.speeds[r]);
    const LinkTimes exchange = links[r].Times(problem.key_time);
    cost.excess = std::max(cost.excess, late + problem.Waits(problem.TimeOf(work, r), exchange));
    cost.between_nodes += links[r].received[1];
    cost.received_keys += ReceivedKeys(problem, &sorted[r]);
  }
  if (problem.HasCapacity()) {
    for (const Overflow& x : ListOverflows(problem, sorted)) cost.overflow += x.rows;
  }
  return cost;
}

// ---- Nodes of consecutive ranks: which ranks exchange keys inside a node.

namespace {

constexpr int kPasses = 8;

struct Neighbor {
  int32_t other = 0;
  int64_t keys = 0;  // in both directions
};

// Slots of ranks in nodes, and who is in them.
class Arrangement {
 public:
  Arrangement(const PlacementProblem& problem, const std::vector<Traffic>& traffic)
      : problem_(&problem), neighbors_(problem.num_ranks), at_(problem.num_ranks) {
    for (const Traffic& x : traffic) {
      neighbors_[x.source].push_back({x.target, x.keys});
      neighbors_[x.target].push_back({x.source, x.keys});
    }
    for (std::vector<Neighbor>& list : neighbors_) {
      std::sort(list.begin(), list.end(),
                [](const Neighbor& a, const Neighbor& b) { return a.other < b.other; });
      size_t last = 0;
      for (size_t i = 1; i < list.size(); ++i) {
        if (list[i].other == list[last].other) {
          list[last].keys += list[i].keys;
        } else {
          list[++last] = list[i];
        }
      }
      if (!list.empty()) list.resize(last + 1);
    }
    std::iota(at_.begin(), at_.end(), 0);
  }

  // Fills one node after another with those that exchange most with its ranks.
  void Grow() {
    std::vector<char> is_placed(at_.size(), 0);
    std::vector<int64_t> pull;
    for (int32_t slot = 0; slot < problem_->num_ranks; ++slot) {
      if (slot % problem_->ranks_per_node == 0) pull.assign(at_.size(), 0);
      int32_t next = -1;
      for (int32_t x = 0; x < problem_->num_ranks; ++x) {
        if (!is_placed[x] && (next < 0 || pull[x] > pull[next])) next = x;
      }
      is_placed[next] = 1;
      at_[next] = slot;
      for (const Neighbor& n : neighbors_[next]) pull[n.other] += n.keys;
    }
  }

  // Swaps pairs while that helps.
  void Improve() {
    CountPulls();
    std::vector<int32_t> who(at_.size());
    for (size_t x = 0; x < at_.size(); ++x) who[at_[x]] = static_cast<int32_t>(x);
    for (int pass = 0; pass < kPasses; ++pass) {
      bool is_better = false;
      for (int32_t x = 0; x < problem_->num_ranks; ++x) {
        const int64_t* pull = &pulls_[x * num_nodes()];
        const auto node = static_cast<int32_t>(std::max_element(pull, pull + num_nodes()) - pull);
        if (node == Node(x)) continue;
        int64_t best = 0;
        int32_t best_y = -1;
        for (int32_t i = 0; i < problem_->ranks_per_node; ++i) {
          const int32_t y = who[node * problem_->ranks_per_node + i];
          const int64_t gain = Gain(x, y);
          if (gain > best) best = gain, best_y = y;
        }
        if (best_y < 0) continue;
        Swap(x, best_y);
        std::swap(who[at_[x]], who[at_[best_y]]);
        is_better = true;
      }
      if (!is_better) return;
    }
  }

  int64_t InsideNodes() const {
    int64_t keys = 0;
    for (int32_t x = 0; x < problem_->num_ranks; ++x) {
      for (const Neighbor& n : neighbors_[x]) {
        if (Node(x) == Node(n.other)) keys += n.keys;
      }
    }
    return keys;
  }

  int32_t Slot(int32_t x) const { return at_[x]; }

 private:
  int32_t num_nodes() const { return problem_->num_ranks / problem_->ranks_per_node; }
  int32_t Node(int32_t x) const { return at_[x] / problem_->ranks_per_node; }

  void CountPulls() {
    pulls_.assign(at_.size() * num_nodes(), 0);
    for (int32_t x = 0; x < problem_->num_ranks; ++x) {
      for (const Neighbor& n : neighbors_[x]) pulls_[x * num_nodes() + Node(n.other)] += n.keys;
    }
  }

  int64_t Between(int32_t x, int32_t y) const {
    const std::vector<Neighbor>& list = neighbors_[x];
    const auto found = std::lower_bound(list.begin(), list.end(), y,
                                        [](const Neighbor& n, int32_t y) { return n.other < y; });
    return found != list.end() && found->other == y ? found->keys : 0;
  }

  // Keys that no longer move between nodes after a swap.
  int64_t Gain(int32_t x, int32_t y) const {
    const int64_t* a = &pulls_[x * num_nodes()];
    const int64_t* b = &pulls_[y * num_nodes()];
    if (problem_->speeds[at_[x]] != problem_->speeds[at_[y]]) return 0;
    return a[Node(y)] - a[Node(x)] + b[Node(x)] - b[Node(y)] - 2 * Between(x, y);
  }

  void Swap(int32_t x, int32_t y) {
    for (const auto& [from, to] : {std::pair(x, Node(y)), std::pair(y, Node(x))}) {
      for (const Neighbor& n : neighbors_[from]) {
        pulls_[n.other * num_nodes() + Node(from)] -= n.keys;
        pulls_[n.other * num_nodes() + to] += n.keys;
      }
    }
    std::swap(at_[x], at_[y]);
  }

  const PlacementProblem* problem_;
  std::vector<std::vector<Neighbor>> neighbors_;
  std::vector<int32_t> at_;     // slot of each rank's pieces
  std::vector<int64_t> pulls_;  // keys exchanged by each with each node
};

// The problem in which each node is one rank.
PlacementProblem NodesOf(const PlacementProblem& problem) {
  PlacementProblem nodes = problem;
  const int32_t m = problem.ranks_per_node;
  nodes.num_ranks = problem.num_ranks / m;
  nodes.tokens_per_rank = problem.tokens_per_rank * m;
  nodes.ranks_per_node = 1;
  nodes.max_received = PlacementProblem::kNoLimit;
  nodes.limits.clear();
  nodes.speeds.clear();
  for (int32_t node = 0; node < nodes.num_ranks; ++node) {
    const auto sum = [&](const std::vector<int64_t>& x) {
      return std::accumulate(x.begin() + node * m, x.begin() + (node + 1) * m,
                             static_cast<int64_t>(0));
    };
    nodes.speeds.push_back(sum(problem.speeds));
    // Half of the tolerance, so that the ranks of a node have the rest.
    const int64_t limit = sum(problem.limits);
    nodes.limits.push_back(limit - limit / 2'000'000 * problem.tolerance_ppm);
  }
  return nodes;
}

// The problem of the ranks of one node, for some pieces of all documents.
PlacementProblem RanksOf(const PlacementProblem& problem, int32_t node) {
  PlacementProblem inside = problem;
  const int32_t m = problem.ranks_per_node;
  inside.num_ranks = m;
  inside.ranks_per_node = 1;
  inside.limits.assign(problem.limits.begin() + node * m, problem.limits.begin() + (node + 1) * m);
  inside.speeds.assign(problem.speeds.begin() + node * m, problem.speeds.begin() + (node + 1) * m);
  return inside;
}

}  // namespace

void ArrangeInNodes(const PlacementProblem& problem, RankPieces* ranks) {
  Arrangement best(problem, ListTraffic(problem, *ranks));
  const auto [slowest, fastest] = std::minmax_element(problem.speeds.begin(), problem.speeds.end());
  if (*slowest == *fastest) {
    Arrangement grown = best;
    grown.Grow();
    grown.Improve();
    best.Improve();
    if (grown.InsideNodes() > best.InsideNodes()) best = std::move(grown);
  } else {
    best.Improve();
  }
  RankPieces moved(ranks->size());
  for (size_t x = 0; x < ranks->size(); ++x) {
    moved[best.Slot(static_cast<int32_t>(x))] = std::move((*ranks)[x]);
  }
  *ranks = std::move(moved);
}

// ---- A construction that reaches the work limit, whatever it costs in keys.

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

// The slowest ranks come first. Each gets as many of the densest remaining tokens (with the most
// work per token) as its limit allows, with the least dense ones, padding first; documents are cut
// anywhere. So no rank has less work than its share of what is left, except by the work of one
// token, and the last rank keeps its limit if the tolerance is worth more than these tokens.
RankPieces MixDensities(const PlacementProblem& problem, const std::vector<Piece>& items) {
  return Mixer(problem, items).Run();
}

// In a batch of few tokens, where the work of one counts: swaps single tokens of the rank furthest
// above its limit for those of others, as long as that helps.
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

}  // namespace

// ---- The choice.

namespace {

constexpr int64_t kSeeds = 4;         // half of them if there are nodes: these are placed, too
constexpr int64_t kSeedsOfNodes = 2;  // of nodes, and of the ranks of each
constexpr int64_t kRepairs = 4;
constexpr int64_t kRepairsOfBlocks = 1;  // that fail: those of similar candidates will, too
constexpr int64_t kFewRanks = 16;
constexpr int64_t kFewChoices = 1 << 13;  // ranks times documents: all seeds are cheap
constexpr int64_t kManyDocuments = 1 << 16;

struct Candidate {
  RankPieces ranks;
  PlacementCost cost;
};

// Repairs those candidates that may become the best: after a repair they have at least as many
// keys. The candidates with the fewest keys come first; of equal costs, only the first is repaired.
Candidate BestAfterRepair(const PlacementProblem& problem, std::vector<Candidate> candidates) {
  const auto hoped = [](PlacementCost cost) {
    cost.excess = 0;
    return cost;
  };
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [&](const Candidate& a, const Candidate& b) { return hoped(a.cost) < hoped(b.cost); });
  Candidate best;
  PlacementCost last;
  int64_t num_repairs = 0;
  const auto consider = [&](Candidate candidate) {
    if (best.ranks.empty() || candidate.cost < best.cost) best = std::move(candidate);
  };
  for (Candidate& candidate : candidates) {
    if (!best.ranks.empty() && !(hoped(candidate.cost) < best.cost)) break;
    if (!best.ranks.empty() && candidate.cost == last) continue;
    last = candidate.cost;
    const bool is_balanced = !best.ranks.empty() && best.cost.excess == 0;
    const bool is_hopeful = problem.block == 1 || num_repairs < kRepairsOfBlocks || is_balanced;
    if (candidate.cost.excess > 0 && is_hopeful && (num_repairs < kRepairs || !is_balanced)) {
      ++num_repairs;
      Candidate repaired = candidate;
      RepairBalance(problem, &repaired.ranks);
      repaired.cost = CostOf(problem, repaired.ranks);
      consider(std::move(repaired));
    }
    consider(std::move(candidate));
  }
  return best;
}

// Several constructions. `items` are documents, or pieces of them.
std::vector<Candidate> ListCandidates(const PlacementProblem& problem,
                                      const std::vector<Piece>& items, int64_t num_seeds) {
  // The number of steps grows linearly with the documents: if there are very many, fewer
  // constructions are tried.
  const auto num_documents = static_cast<int64_t>(items.size());
  int64_t most_seeds =
      std::max<int64_t>(1, num_seeds * kManyDocuments / std::max(kManyDocuments, num_documents));
  if (problem.block > 1) most_seeds = 1;  // most of them have to be repaired
  most_seeds = std::min(most_seeds, problem.most_seeds);
  std::vector<Candidate> candidates;
  for (int64_t seed = 0; seed < most_seeds; ++seed) {
    for (int64_t dense_percent : {0, 85}) {
      for (int64_t reserve_percent : {0, 50}) {
        Closing closing;
        closing.reserve_percent = reserve_percent;
        closing.dense_percent = dense_percent;
        closing.seed = seed;
        RankPieces ranks = CloseRanks(problem, items, closing);
        if (problem.HasNodes()) ArrangeInNodes(problem, &ranks);
        const PlacementCost cost = CostOf(problem, ranks);
        candidates.push_back({std::move(ranks), cost});
      }
    }
  }
  return candidates;
}

Candidate Construct(const PlacementProblem& problem, const std::vector<Piece>& items) {
  const int64_t num_seeds = problem.num_ranks <= kFewRanks ? 2 * kSeeds : kSeeds;
  return BestAfterRepair(
      problem, ListCandidates(problem, items, problem.HasNodes() ? num_seeds / 2 : num_seeds));
}

RankPieces ConstructInNodes(const PlacementProblem& problem, const std::vector<Piece>& items) {
  std::vector<Candidate> candidates = ListCandidates(problem, items, kSeedsOfNodes);
  return std::move(
      std::min_element(candidates.begin(), candidates.end(),
                       [](const Candidate& a, const Candidate& b) { return a.cost < b.cost; })
          ->ranks);
}

// Places documents on nodes, as if each were one large rank, and then the pieces of each node on
// its ranks. Long documents that fit a node then do not leave it.
RankPieces ConstructByNodes(const PlacementProblem& problem, const std::vector<Piece>& items) {
  const PlacementProblem nodes = NodesOf(problem);
  const RankPieces by_node = ConstructInNodes(nodes, items);
  RankPieces ranks;
  for (int32_t node = 0; node < nodes.num_ranks; ++node) {
    std::vector<Piece> pieces = by_node[node];
    SortAndJoin(&pieces);
    RankPieces inside = ConstructInNodes(RanksOf(problem, node), pieces);
    for (std::vector<Piece>& rank : inside) ranks.push_back(std::move(rank));
  }
  return ranks;
}

PlacementProblem WithoutCapacity(PlacementProblem problem) {
  problem.max_received = PlacementProblem::kNoLimit;
  return problem;
}

}  // namespace

RankPieces PlaceDocuments(PlacementProblem problem) {
  if (!problem.table && problem.pairs.IsForward()) {
    problem.pairs = problem.pairs.Mirrored();
    RankPieces ranks = PlaceDocuments(problem);
    for (std::vector<Piece>& pieces : ranks) {
      for (Piece& piece : pieces) {
        const int64_t length = problem.lengths[piece.document];
        piece = {length - piece.end, length - piece.start, piece.document};
      }
      SortAndJoin(&pieces);
    }
    return ranks;
  }
  SetLimits(&problem);
  if (problem.HasCapacity()) {  // a search with a capacity may find less
    RankPieces free = PlaceDocuments(WithoutCapacity(problem));
    if (CostOf(problem, free).overflow == 0) return free;
  }
  std::vector<Piece> items;
  for (size_t i = 0; i < problem.lengths.size(); ++i) {
    if (problem.lengths[i] > 0) items.push_back({0, problem.lengths[i], static_cast<int32_t>(i)});
  }

  if (problem.CountsTime()) {
    PlacementProblem by_work = problem;
    by_work.key_time = {};
    const auto num_items = static_cast<int64_t>(items.size());
    if (problem.num_ranks * num_items > kFewChoices) by_work.most_seeds = 1;
    return PlaceByTime(problem, items, PlaceDocuments(by_work));
  }
  Candidate best = Construct(problem, items);
  const auto consider = [&](RankPieces ranks) {
    const PlacementCost cost = CostOf(problem, ranks);
    if (cost < best.cost) best = {std::move(ranks), cost};
  };
  if (problem.HasNodes()) {
    RankPieces by_nodes = ConstructByNodes(problem, items);
    PlacementCost hoped = CostOf(problem, by_nodes);
    const bool is_unbalanced = hoped.excess > 0;
    hoped.excess = 0;
    if (is_unbalanced && hoped < best.cost) RepairBalance(problem, &by_nodes);
    consider(std::move(by_nodes));
  }
  while (problem.block > 1 && (best.cost.overflow > 0 || best.cost.excess > 0)) {
    problem.block /= 2;  // everything else is worth more than aligned cuts
    consider(Construct(problem, items).ranks);
  }
  if (best.cost.excess > 0) {
    RankPieces mixed = MixDensities(problem, items);
    if (problem.HasNodes()) ArrangeInNodes(problem, &mixed);
    consider(std::move(mixed));
  }
  if (best.cost.excess > 0) {
    RankPieces swapped = best.ranks;
    SwapTokens(problem, &swapped);
    consider(std::move(swapped));
  }
  if (problem.HasCapacity() && (best.cost.overflow > 0 || best.cost.excess > 0)) {
    consider(ConcedeWork(problem, items));
  }
  for (std::vector<Piece>& pieces : best.ranks) SortAndJoin(&pieces);
  return std::move(best.ranks);
}

}  // namespace cpd
