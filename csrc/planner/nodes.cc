// Nodes of consecutive ranks: which ranks exchange keys inside a node.
#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/placement_steps.h"

namespace cpd {
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

PlacementProblem RanksOf(const PlacementProblem& problem, int32_t node) {
  PlacementProblem inside = problem;
  const int32_t m = problem.ranks_per_node;
  inside.num_ranks = m;
  inside.ranks_per_node = 1;
  inside.limits.assign(problem.limits.begin() + node * m, problem.limits.begin() + (node + 1) * m);
  inside.speeds.assign(problem.speeds.begin() + node * m, problem.speeds.begin() + (node + 1) * m);
  return inside;
}

}  // namespace cpd
