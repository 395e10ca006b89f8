// Keeps work and cost up to date while queries are given from rank to rank.
#include "planner/query_shares.h"

#include <algorithm>

#include "planner/placement.h"

namespace cpd {

QueryShares::QueryShares(const QueryProblem& problem)
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

int64_t QueryShares::Excess() const {
  int64_t excess = 0;
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    excess = std::max(excess, work_[rank] - limits_[rank]);
  }
  return excess;
}

int64_t QueryShares::Overflow() const {
  int64_t overflow = 0;
  if (problem_.HasCapacities()) {
    for (int32_t rank = 0; rank < num_ranks(); ++rank) overflow += Overflow(rank);
  }
  return overflow;
}

template <typename Visit>
void QueryShares::ForEachKeysIf(const Share& part, int32_t rank, int32_t other,
                                const Visit& visit) const {
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

int64_t QueryShares::CostChange(const Share& part, int32_t rank) const {
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

int64_t QueryShares::OverflowIf(const Share& part, int32_t rank, int32_t other,
                                int64_t reserve) const {
  int64_t keys = keys_[rank];
  const auto add = [&](const Share& moved, int64_t sign) {
    ForEachKeysIf(moved, rank, other,
                  [&](int64_t first, int64_t last) { keys += sign * (last - first); });
  };
  if (problem_.max_keys < QueryProblem::kNoLimit) add(part, 1), add(part.Cut(0, 0), -1);
  const int64_t queries = part.num_queries() * ((other == rank) - (part.rank == rank));
  return OverflowOf(queries_[rank] + queries + reserve, keys + reserve);
}

bool QueryShares::IsAllowed(const Share& part, int32_t rank) const {
  return !problem_.HasCapacities() || OverflowIf(part, rank, rank) == 0;
}

void QueryShares::Give(const Share& part, int32_t to) {
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

void QueryShares::SendHome(int32_t rank) {
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

void QueryShares::Undo() {
  is_recording_ = false;
  for (; !record_.empty(); record_.pop_back()) {
    Replace(record_.back().first, std::move(record_.back().second));
  }
}

void QueryShares::Replace(int32_t document, std::vector<Share> shares) {
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

void QueryShares::AddLoads(int32_t document, int64_t sign) {
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

int64_t QueryShares::CostOf(int32_t document) {
  int64_t cost = 0;
  for (const Share& share : shares_[document]) {
    cost += share.num_queries() * QueryCost(share.home, share.rank);
  }
  ForEachKeys(document, [&](const Share& share, int64_t first, int64_t last) {
    cost += KeysCost(document, share.rank, first, last);
  });
  return cost;
}

template <typename Visit>
void QueryShares::ForEachKeys(int32_t document, const Visit& visit) {
  for (const Share& share : shares_[document]) {
    int64_t& seen = seen_[share.rank];
    const int64_t first = std::max(seen, problem_.FirstKey(document, share.start));
    const int64_t last = problem_.LastKey(document, share.end);
    if (first < last) visit(share, first, last);
    seen = std::max(seen, last);
  }
  for (const Share& share : shares_[document]) seen_[share.rank] = 0;
}

void QueryShares::Append(const Share& share, std::vector<Share>* shares) {
  if (!shares->empty() && shares->back().rank == share.rank && shares->back().home == share.home) {
    shares->back().end = share.end;
  } else {
    shares->push_back(share);
  }
}

}  // namespace cpd
