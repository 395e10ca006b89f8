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

  int64_t num_queries() const { return end - start; }
};

// The assignment, with the work of each rank and the cost of all movement. Each document is
// partitioned into shares. Changes can be undone.
class QueryShares {
 public:
  explicit QueryShares(const QueryProblem& problem);

  const QueryProblem& problem() const { return problem_; }
  int32_t num_ranks() const { return problem_.num_ranks; }
  int32_t num_documents() const { return static_cast<int32_t>(shares_.size()); }
  const std::vector<Share>& Of(int32_t document) const { return shares_[document]; }
  int64_t Work(int64_t start, int64_t end) const { return problem_.pairs(start, end); }
  int64_t WorkOf(int32_t rank) const { return work_[rank]; }
  int64_t MeanWork() const { return total_work_ / problem_.num_ranks; }
  int64_t Limit() const { return limit_; }
  int64_t Excess() const;  // work of the most loaded rank above the limit, at least 0
  int64_t Cost() const { return cost_; }

  // Documents with tokens at home on the rank, longest first.
  const std::vector<int32_t>& HomeDocuments(int32_t rank) const { return home_documents_[rank]; }
  // Documents without tokens at home on the rank, of which it computes queries.
  const std::vector<int32_t>& Guests(int32_t rank) const { return guests_[rank]; }

  // Tokens of [start, end) that the rank holds.
  int64_t NumAtHome(int32_t document, int32_t rank, int64_t start, int64_t end) const {
    const int64_t first = rank * problem_.columns_per_rank - problem_.columns[document];
    const int64_t last = first + problem_.columns_per_rank;
    return std::max<int64_t>(0, std::min(end, last) - std::max(start, first));
  }

  // The keys of the document that the rank receives if queries [start, end) were computed by
  // `other`. With an empty range: that it receives now.
  int64_t KeysIf(int32_t document, int32_t rank, int64_t start, int64_t end, int32_t other) const;

  // The change of `Cost` if a part of a share were computed by `rank`.
  int64_t CostChange(int32_t document, const Share& share, int64_t start, int64_t end,
                     int32_t rank) const;

  // Assigns queries [start, end) of a share of `from` to `to`.
  void Give(int32_t document, int64_t start, int64_t end, int32_t from, int32_t to);
  // Returns all guests of the rank to their homes.
  void SendHome(int32_t rank);

  // From here on, changes are recorded.
  void Record() { record_.clear(), is_recording_ = true; }
  // Undoes the recorded changes.
  void Undo();

 private:
  void Replace(int32_t document, std::vector<Share> shares);
  int64_t CostOf(int32_t document);
  bool IsGuest(int32_t document, const Share& share) const {
    return share.rank != share.home &&
           NumAtHome(document, share.rank, 0, problem_.lengths[document]) == 0;
  }
  static void Append(const Share& share, std::vector<Share>* shares);

  const QueryProblem& problem_;
  std::vector<std::vector<Share>> shares_;  // of each document, by start
  std::vector<int64_t> costs_;              // of each document
  std::vector<int64_t> work_;               // of each rank
  std::vector<std::vector<int32_t>> home_documents_, guests_;
  int64_t total_work_ = 0, limit_ = 0, cost_ = 0;
  std::vector<int64_t> seen_;  // of each rank: keys that `CostOf` has counted; 0 between calls
  std::vector<std::pair<int32_t, std::vector<Share>>> record_;  // documents before they changed
  bool is_recording_ = false;
};

}  // namespace cpd
