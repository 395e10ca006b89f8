// Which rank computes which queries of packed documents that live on their home ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/move_queries.h"

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
  explicit QueryShares(const QueryProblem& problem);

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
  int64_t Excess() const;  // the most work of a rank above its limit, at least 0
  int64_t Cost() const { return cost_; }

  int64_t QueriesOf(int32_t rank) const { return queries_[rank]; }
  int64_t KeysOf(int32_t rank) const { return keys_[rank]; }
  // Queries and keys by which the rank exceeds its capacities, if `reserve` of each stay free.
  int64_t Overflow(int32_t rank, int64_t reserve = 0) const {
    return OverflowOf(queries_[rank] + reserve, keys_[rank] + reserve);
  }
  int64_t Overflow() const;  // of all ranks
  // The overflow of a rank if a part of a share were computed by `other`.
  int64_t OverflowIf(const Share& part, int32_t rank, int32_t other, int64_t reserve = 0) const;

  // Whether `rank` may compute a part of a share: within its capacities.
  bool IsAllowed(const Share& part, int32_t rank) const;

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
  int64_t CostChange(const Share& part, int32_t rank) const;

  // Assigns a part of a share to another rank.
  void Give(const Share& part, int32_t to);
  // Returns all guests of the rank to their homes.
  void SendHome(int32_t rank);

  // From here on, changes are recorded.
  void Record() { record_.clear(), is_recording_ = true; }
  // Undoes the recorded changes.
  void Undo();

 private:
  static constexpr int64_t kBetweenNodes = 1000;

  void Replace(int32_t document, std::vector<Share> shares);
  // Adds the document to the loads of all ranks, or removes it (sign -1).
  void AddLoads(int32_t document, int64_t sign);
  int64_t CostOf(int32_t document);
  // Calls `visit(first, last)` for the ranges of keys of the document that the rank needs if the
  // part were computed by `other`. With an empty part: that it needs now.
  template <typename Visit>
  void ForEachKeysIf(const Share& part, int32_t rank, int32_t other, const Visit& visit) const;
  int64_t OverflowOf(int64_t queries, int64_t keys) const {
    return std::max<int64_t>(0, queries - problem_.max_queries) +
           std::max<int64_t>(0, keys - problem_.max_keys);
  }
  // Calls `visit(share, first, last)` for the keys that each share of the document adds to those of
  // earlier shares of its rank. If there are any.
  template <typename Visit>
  void ForEachKeys(int32_t document, const Visit& visit);
  bool IsGuest(int32_t document, const Share& share) const {
    return share.rank != share.home &&
           NumAtHome(document, share.rank, 1, 0, problem_.lengths[document]) == 0;
  }
  static void Append(const Share& share, std::vector<Share>* shares);

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
