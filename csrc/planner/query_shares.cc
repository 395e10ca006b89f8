// Keeps work and cost up to date while queries are given from rank to rank.
#include "planner/query_shares.h"

#include <algorithm>

namespace cpd {

QueryShares::QueryShares(const QueryProblem& problem)
    : problem_(problem),
      shares_(problem.lengths.size()),
      costs_(problem.lengths.size()),
      work_(problem.num_ranks),
      home_documents_(problem.num_ranks),
      guests_(problem.num_ranks),
      seen_(problem.num_ranks) {
  for (int32_t document = 0; document < num_documents(); ++document) {
    const int64_t length = problem.lengths[document], column = problem.columns[document];
    total_work_ += Work(0, length);
    for (int64_t start = 0, end; start < length; start = end) {
      const auto rank = static_cast<int32_t>((column + start) / problem.columns_per_rank);
      end = std::min(length, (rank + 1) * problem.columns_per_rank - column);
      shares_[document].push_back({start, end, rank, rank});
      work_[rank] += Work(start, end);
      home_documents_[rank].push_back(document);
    }
    cost_ += costs_[document] = CostOf(document);
  }
  for (std::vector<int32_t>& documents : home_documents_) {
    std::sort(documents.begin(), documents.end(), [&](int32_t a, int32_t b) {
      const int64_t x = problem.lengths[a], y = problem.lengths[b];
      return x != y ? x > y : a < b;
    });
  }
  constexpr int64_t kMillion = 1'000'000;
  const int64_t mean = MeanWork();
  limit_ = mean + mean / kMillion * problem.tolerance_ppm +
           mean % kMillion * problem.tolerance_ppm / kMillion;
}

int64_t QueryShares::Excess() const {
  return std::max<int64_t>(0, *std::max_element(work_.begin(), work_.end()) - limit_);
}

int64_t QueryShares::KeysIf(int32_t document, int32_t rank, int64_t start, int64_t end,
                            int32_t other) const {
  int64_t keys = 0, seen = 0;
  const auto add = [&](int64_t first, int64_t last) {
    if (first >= last) return;
    const int64_t from = std::max(seen, problem_.pairs.FirstKey(first));
    keys += last - from - NumAtHome(document, rank, from, last);
    seen = last;
  };
  for (const Share& share : shares_[document]) {
    if (share.end <= start || share.start >= end) {
      if (share.rank == rank) add(share.start, share.end);
      continue;
    }
    if (share.rank == rank) add(share.start, start);
    if (other == rank) add(std::max(share.start, start), std::min(share.end, end));
    if (share.rank == rank) add(end, share.end);
  }
  return keys;
}

int64_t QueryShares::CostChange(int32_t document, const Share& share, int64_t start, int64_t end,
                                int32_t rank) const {
  int64_t keys = 0;
  for (int32_t changed : {rank, share.rank}) {
    keys += KeysIf(document, changed, start, end, rank) - KeysIf(document, changed, 0, 0, changed);
  }
  const int64_t queries = (end - start) * ((rank != share.home) - (share.rank != share.home));
  return problem_.key_cost * keys + problem_.query_cost * queries;
}

void QueryShares::Give(int32_t document, int64_t start, int64_t end, int32_t from, int32_t to) {
  std::vector<Share> shares;
  for (const Share& share : shares_[document]) {
    if (share.rank != from || share.end <= start || share.start >= end) {
      Append(share, &shares);
      continue;
    }
    const int64_t first = std::max(share.start, start), last = std::min(share.end, end);
    if (share.start < first) Append({share.start, first, share.home, from}, &shares);
    Append({first, last, share.home, to}, &shares);
    if (last < share.end) Append({last, share.end, share.home, from}, &shares);
  }
  Replace(document, std::move(shares));
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
  for (const Share& share : current) {
    work_[share.rank] -= Work(share.start, share.end);
    if (!IsGuest(document, share)) continue;
    std::vector<int32_t>& guests = guests_[share.rank];
    const auto found = std::find(guests.begin(), guests.end(), document);
    if (found != guests.end()) guests.erase(found);
  }
  current.swap(shares);
  for (const Share& share : current) {
    work_[share.rank] += Work(share.start, share.end);
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

int64_t QueryShares::CostOf(int32_t document) {
  const std::vector<Share>& shares = shares_[document];
  int64_t keys = 0, queries = 0;
  for (const Share& share : shares) {
    const int64_t from = std::max(seen_[share.rank], problem_.pairs.FirstKey(share.start));
    keys += share.end - from - NumAtHome(document, share.rank, from, share.end);
    seen_[share.rank] = share.end;
    if (share.rank != share.home) queries += share.num_queries();
  }
  for (const Share& share : shares) seen_[share.rank] = 0;
  return problem_.key_cost * keys + problem_.query_cost * queries;
}

void QueryShares::Append(const Share& share, std::vector<Share>* shares) {
  if (!shares->empty() && shares->back().rank == share.rank && shares->back().home == share.home) {
    shares->back().end = share.end;
  } else {
    shares->push_back(share);
  }
}

}  // namespace cpd
