// Which rank computes which queries of packed documents that live on their home ranks, and the
// steps that change it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/placement.h"
#include "planner/problem.h"

namespace cpd {

// Queries [start, end) of a document. Rank `home` holds them, rank `rank` computes them.
struct Share {
  int64_t start = 0;
  int64_t end = 0;
  int32_t home = 0;
  int32_t rank = 0;
  int32_t document = 0;

  int64_t num_queries() const { return end - start; }
  // A part of it.
  Share Cut(int64_t first, int64_t last) const { return {first, last, home, rank, document}; }
};

// The assignment, with the load of each rank and the cost of all movement. Each document is
// partitioned into shares. Changes can be undone.
class QueryShares {
 public:
  explicit QueryShares(const QueryProblem& problem)
      : problem_(problem),
        shares_(problem.lengths.size()),
        costs_(problem.lengths.size()),
        work_(problem.num_ranks),
        queries_(problem.num_ranks),
        keys_(problem.num_ranks),
        home_documents_(problem.num_ranks),
        guests_(problem.num_ranks),
        between_nodes_(problem.HasNodes() ? kBetweenNodes : 0),
        seen_(problem.num_ranks) {
    int64_t total_work = 0;
    for (int32_t document = 0; document < num_documents(); ++document) {
      const int64_t length = problem.lengths[document], column = problem.columns[document];
      total_work += problem.Work({0, length, document});
      for (int64_t start = 0, end; start < length; start = end) {
        const auto rank = static_cast<int32_t>((column + start) / problem.columns_per_rank);
        end = std::min(length, (rank + 1) * problem.columns_per_rank - column);
        shares_[document].push_back({start, end, rank, rank, document});
        home_documents_[rank].push_back(document);
      }
      AddLoads(document, 1);
      cost_ += costs_[document] = CostOf(document);
    }
    for (std::vector<int32_t>& documents : home_documents_) {
      std::sort(documents.begin(), documents.end(), [&](int32_t a, int32_t b) {
        const int64_t x = problem.lengths[a], y = problem.lengths[b];
        return x != y ? x > y : a < b;
      });
    }
    std::vector<int64_t> speeds = problem.speeds;
    if (speeds.empty()) speeds.assign(problem.num_ranks, 1);
    fair_work_ = WorkLimits(total_work, speeds, 0);
    limits_ = WorkLimits(total_work, speeds, problem.tolerance_ppm);
  }

  const QueryProblem& problem() const { return problem_; }
  int32_t num_ranks() const { return problem_.num_ranks; }
  int32_t num_documents() const { return static_cast<int32_t>(shares_.size()); }
  const std::vector<Share>& Of(int32_t document) const { return shares_[document]; }
  int64_t Work(const Share& part) const {
    return problem_.Work({part.start, part.end, part.document});
  }
  int64_t WorkOf(int32_t rank) const { return work_[rank]; }
  int64_t FairWork(int32_t rank) const { return fair_work_[rank]; }  // without the tolerance
  int64_t Limit(int32_t rank) const { return limits_[rank]; }

  // The most work of a rank above its limit, at least 0.
  int64_t Excess() const {
    int64_t excess = 0;
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      excess = std::max(excess, work_[rank] - limits_[rank]);
    }
    return excess;
  }

  int64_t Cost() const { return cost_; }

  int64_t QueriesOf(int32_t rank) const { return queries_[rank]; }
  int64_t KeysOf(int32_t rank) const { return keys_[rank]; }
  // Queries and keys by which the rank exceeds its capacities, if `reserve` of each stay free.
  int64_t Overflow(int32_t rank, int64_t reserve = 0) const {
    return OverflowOf(queries_[rank] + reserve, keys_[rank] + reserve);
  }

  // Of all ranks.
  int64_t Overflow() const {
    int64_t overflow = 0;
    if (problem_.HasCapacities()) {
      for (int32_t rank = 0; rank < num_ranks(); ++rank) overflow += Overflow(rank);
    }
    return overflow;
  }

  // The overflow of a rank if a part of a share were computed by `other`.
  int64_t OverflowIf(const Share& part, int32_t rank, int32_t other, int64_t reserve = 0) const {
    int64_t keys = keys_[rank];
    const auto add = [&](const Share& moved, int64_t sign) {
      ForEachKeysIf(moved, rank, other,
                    [&](int64_t first, int64_t last) { keys += sign * (last - first); });
    };
    if (problem_.max_keys < QueryProblem::kNoLimit) add(part, 1), add(part.Cut(0, 0), -1);
    const int64_t queries = part.num_queries() * ((other == rank) - (part.rank == rank));
    return OverflowOf(queries_[rank] + queries + reserve, keys + reserve);
  }

  // Whether `rank` may compute a part of a share: within its capacities.
  bool IsAllowed(const Share& part, int32_t rank) const {
    return !problem_.HasCapacities() || OverflowIf(part, rank, rank) == 0;
  }

  // Documents with tokens at home on the rank, longest first.
  const std::vector<int32_t>& HomeDocuments(int32_t rank) const { return home_documents_[rank]; }
  // Documents without tokens at home on the rank, of which it computes queries.
  const std::vector<int32_t>& Guests(int32_t rank) const { return guests_[rank]; }

  // Tokens of [start, end) that a rank holds, or that `size` ranks, a node, hold.
  int64_t NumAtHome(int32_t document, int32_t node, int64_t size, int64_t start,
                    int64_t end) const {
    const int64_t width = size * problem_.columns_per_rank;
    const int64_t first = node * width - problem_.columns[document];
    return std::max<int64_t>(0, std::min(end, first + width) - std::max(start, first));
  }

  // The cost of bringing keys [start, end) to the rank, and a query from `home` to `rank`. Between
  // nodes it counts so often that it is minimized first.
  int64_t KeysCost(int32_t document, int32_t rank, int64_t start, int64_t end) const {
    int64_t keys = end - start - NumAtHome(document, rank, 1, start, end);
    if (between_nodes_ > 0) {
      const int32_t size = problem_.ranks_per_node;
      keys += between_nodes_ * (end - start - NumAtHome(document, rank / size, size, start, end));
    }
    return problem_.key_cost * keys;
  }
  int64_t QueryCost(int32_t home, int32_t rank) const {
    if (home == rank) return 0;
    const int32_t size = problem_.ranks_per_node;
    return problem_.query_cost * (1 + (home / size == rank / size ? 0 : between_nodes_));
  }

  // The change of `Cost` if a part of a share were computed by `rank`.
  int64_t CostChange(const Share& part, int32_t rank) const {
    int64_t change =
        part.num_queries() * (QueryCost(part.home, rank) - QueryCost(part.home, part.rank));
    for (int32_t changed : {rank, part.rank}) {
      const auto sum = [&](const Share& moved, int32_t other) {
        int64_t cost = 0;
        ForEachKeysIf(moved, changed, other, [&](int64_t first, int64_t last) {
          cost += KeysCost(part.document, changed, first, last);
        });
        return cost;
      };
      change += sum(part, rank) - sum(part.Cut(0, 0), changed);
    }
    return change;
  }

  // Assigns a part of a share to another rank.
  void Give(const Share& part, int32_t to) {
    std::vector<Share> shares;
    for (const Share& share : shares_[part.document]) {
      if (share.rank != part.rank || share.end <= part.start || share.start >= part.end) {
        Append(share, &shares);
        continue;
      }
      const int64_t first = std::max(share.start, part.start), last = std::min(share.end, part.end);
      Share given = share.Cut(first, last);
      given.rank = to;
      if (share.start < first) Append(share.Cut(share.start, first), &shares);
      Append(given, &shares);
      if (last < share.end) Append(share.Cut(last, share.end), &shares);
    }
    Replace(part.document, std::move(shares));
  }

  // Returns all guests of the rank to their homes.
  void SendHome(int32_t rank) {
    while (!guests_[rank].empty()) {
      const int32_t document = guests_[rank].back();
      std::vector<Share> shares;
      for (Share share : shares_[document]) {
        if (share.rank == rank) share.rank = share.home;
        Append(share, &shares);
      }
      Replace(document, std::move(shares));
    }
  }

  // From here on, changes are recorded.
  void Record() { record_.clear(), is_recording_ = true; }
  // Undoes the recorded changes.
  void Undo() {
    is_recording_ = false;
    for (; !record_.empty(); record_.pop_back()) {
      Replace(record_.back().first, std::move(record_.back().second));
    }
  }

 private:
  static constexpr int64_t kBetweenNodes = 1000;

  void Replace(int32_t document, std::vector<Share> shares) {
    std::vector<Share>& current = shares_[document];
    AddLoads(document, -1);
    for (const Share& share : current) {
      if (!IsGuest(document, share)) continue;
      std::vector<int32_t>& guests = guests_[share.rank];
      const auto found = std::find(guests.begin(), guests.end(), document);
      if (found != guests.end()) guests.erase(found);
    }
    current.swap(shares);
    AddLoads(document, 1);
    for (const Share& share : current) {
      if (!IsGuest(document, share)) continue;
      std::vector<int32_t>& guests = guests_[share.rank];
      if (std::find(guests.begin(), guests.end(), document) == guests.end()) {
        guests.push_back(document);
      }
    }
    cost_ -= costs_[document];
    cost_ += costs_[document] = CostOf(document);
    if (is_recording_) record_.emplace_back(document, std::move(shares));
  }

  // Adds the document to the loads of all ranks, or removes it (sign -1).
  void AddLoads(int32_t document, int64_t sign) {
    const std::vector<Share>& shares = shares_[document];
    for (const Share& share : shares) {
      work_[share.rank] += sign * Work(share);
      queries_[share.rank] += sign * share.num_queries();
    }
    if (problem_.max_keys == QueryProblem::kNoLimit) return;
    ForEachKeys(document, [&](const Share& share, int64_t first, int64_t last) {
      keys_[share.rank] += sign * (last - first);
    });
  }

  int64_t CostOf(int32_t document) {
    int64_t cost = 0;
    for (const Share& share : shares_[document]) {
      cost += share.num_queries() * QueryCost(share.home, share.rank);
    }
    ForEachKeys(document, [&](const Share& share, int64_t first, int64_t last) {
      cost += KeysCost(document, share.rank, first, last);
    });
    return cost;
  }

  // Calls `visit(first, last)` for the ranges of keys of the document that the rank needs if the
  // part were computed by `other`. With an empty part: that it needs now.
  template <typename Visit>
  void ForEachKeysIf(const Share& part, int32_t rank, int32_t other, const Visit& visit) const {
    const int64_t start = part.start, end = part.end;
    int64_t seen = 0;
    const auto add = [&](int64_t first, int64_t last) {
      if (first >= last) return;
      const int64_t from = std::max(seen, problem_.FirstKey(part.document, first));
      const int64_t to = problem_.LastKey(part.document, last);
      if (from < to) visit(from, to);
      seen = std::max(seen, to);
    };
    for (const Share& share : shares_[part.document]) {
      if (share.end <= start || share.start >= end) {
        if (share.rank == rank) add(share.start, share.end);
        continue;
      }
      if (share.rank == rank) add(share.start, start);
      if (other == rank) add(std::max(share.start, start), std::min(share.end, end));
      if (share.rank == rank) add(end, share.end);
    }
  }

  int64_t OverflowOf(int64_t queries, int64_t keys) const {
    return std::max<int64_t>(0, queries - problem_.max_queries) +
           std::max<int64_t>(0, keys - problem_.max_keys);
  }
  // Calls `visit(share, first, last)` for the keys that each share of the document adds to those of
  // earlier shares of its rank. If there are any.
  template <typename Visit>
  void ForEachKeys(int32_t document, const Visit& visit) {
    for (const Share& share : shares_[document]) {
      int64_t& seen = seen_[share.rank];
      const int64_t first = std::max(seen, problem_.FirstKey(document, share.start));
      const int64_t last = problem_.LastKey(document, share.end);
      if (first < last) visit(share, first, last);
      seen = std::max(seen, last);
    }
    for (const Share& share : shares_[document]) seen_[share.rank] = 0;
  }

  bool IsGuest(int32_t document, const Share& share) const {
    return share.rank != share.home &&
           NumAtHome(document, share.rank, 1, 0, problem_.lengths[document]) == 0;
  }

  static void Append(const Share& share, std::vector<Share>* shares) {
    if (!shares->empty() && shares->back().rank == share.rank &&
        shares->back().home == share.home) {
      shares->back().end = share.end;
    } else {
      shares->push_back(share);
    }
  }

  const QueryProblem& problem_;
  std::vector<std::vector<Share>> shares_;  // of each document, by start
  std::vector<int64_t> costs_;              // of each document
  // Of each rank. Keys include its own, and are only counted if they are limited.
  std::vector<int64_t> work_, fair_work_, limits_, queries_, keys_;
  std::vector<std::vector<int32_t>> home_documents_, guests_;
  int64_t between_nodes_ = 0;  // what a row between nodes costs more
  int64_t cost_ = 0;
  std::vector<int64_t> seen_;  // of each rank: keys that are counted; 0 between calls
  std::vector<std::pair<int32_t, std::vector<Share>>> record_;  // documents before they changed
  bool is_recording_ = false;
};

// ---- The steps of a plan: ranks with too much work give queries away, and so do ranks without
// room.

// A generator of pseudorandom numbers (xorshift64), the same on every machine.
class Random {
 public:
  int64_t Below(int64_t bound) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<int64_t>((state_ >> 16) % static_cast<uint64_t>(bound));
  }
  // A number within `per_mille` of 1000.
  int64_t Around1000(int64_t per_mille) {
    return per_mille == 0 ? 1000 : 1000 - per_mille + Below(2 * per_mille + 1);
  }

 private:
  uint64_t state_ = 88172645463325252;
};

struct Filling {
  int64_t min_queries = 1;      // that are split from a document, if possible
  int64_t block = 1;            // of which all cuts are multiples
  int64_t noise_per_mille = 0;  // of comparisons, so that repeated calls differ
  // A rank that can be filled from the end of a share takes the longest such share. If a document
  // must be given to many ranks, each receives the keys up to its last query. Ranks with the most
  // room then take the last queries, so that few ranks receive all keys.
  bool longest_first = false;
  bool inside_nodes = false;  // Ranks take from ranks of their node only.
};

// Returns the number of candidates considered. Stops if no rank is above the limit, or if nothing
// fits.
int64_t FillRanks(const Filling& filling, Random* random, QueryShares* shares);

// Gives queries away from ranks that receive more queries or keys than they have room for. Stops if
// no rank exceeds its capacities, or if no rank with room can help. Both return the number of
// candidates considered.
int64_t KeepCapacities(QueryShares* shares);

// Gives queries with little work away from a rank, until it has room for so many rows or no other
// rank can take more.
int64_t MakeRoom(int32_t rank, int64_t rows, QueryShares* shares);

}  // namespace cpd
