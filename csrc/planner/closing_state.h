// The remaining documents while ranks are closed one after another, and ways to take from them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/item_pool.h"
#include "planner/placement.h"
#include "planner/placement_steps.h"

namespace cpd {

// Documents that join or leave a rank together.
struct Sum {
  int64_t tokens = 0;
  int64_t work = 0;
  int64_t first = -1;
  int64_t second = -1;

  bool operator<(const Sum& other) const {
    if (tokens != other.tokens) return tokens < other.tokens;
    if (work != other.work) return work < other.work;
    return first != other.first ? first < other.first : second < other.second;
  }
};

class ClosingState {
 protected:
  ClosingState(const PlacementProblem& problem, const std::vector<Piece>& items,
               const Closing& closing, std::vector<Concession>* concessions)
      : problem_(problem),
        closing_(closing),
        concessions_(concessions),
        tokens_per_rank_(problem.tokens_per_rank),
        pool_(problem, items) {
    padding_ = problem.num_ranks * problem.tokens_per_rank;
    for (const Piece& item : items) {
      padding_ -= item.num_tokens();
      work_left_ += Work(item);
    }
    ranks_.resize(problem.num_ranks);
    random_ = closing.seed;
    KeepBack(closing.reserve_percent * problem.num_ranks / 100);
  }

  int64_t Work(const Piece& piece) const { return problem_.Work(piece); }

  // Begins to fill a rank.
  void Open(int32_t rank) {
    pieces_ = &ranks_[rank];
    limit_ = problem_.limits[rank];
  }

  // The work of a rank that closes with this piece.
  int64_t Limit(const Piece& item) const {
    if (concessions_ == nullptr) return limit_;
    return Scaled(limit_, (*concessions_)[item.document].work_permille);
  }

  int64_t Rows(const Piece& piece) const { return problem_.Rows(piece); }

  // Tokens that a slice, or a reserved document, must save. This and the next vary from rank to
  // rank with a seed: 0, 1, 4 or 16 times the value without.
  int64_t SliceGain() const { return 50 * factor_; }

  // A deviation from the wanted work by that of this many mean tokens costs as much as one key.
  int64_t Leniency() const { return 8 * (factor_ > 0 ? factor_ : 1); }

  void Vary() {
    if (closing_.seed == 0) return;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
    constexpr int64_t kFactors[] = {0, 1, 4, 16};
    factor_ = kFactors[random_ >> 62];
  }

  void Give(const Piece& piece) { pieces_->push_back(piece); }

  // Reserves short documents of all lengths, to fill later ranks to the token.
  void KeepBack(int64_t num) {
    const int64_t among = pool_.size() * 3 / 4;
    num = std::min(num, among / 3);
    for (int64_t i = num - 1; i >= 0; --i) reserve_.push_back(pool_.Take(i * among / num));
    std::reverse(reserve_.begin(), reserve_.end());
  }

  void Release() {
    for (const Piece& item : reserve_) pool_.Insert(item);
    reserve_.clear();
  }

  // One or two of the items [begin, end), ascending.
  void ListSums(int64_t begin, int64_t end, std::vector<Sum>* sums) const {
    sums->clear();
    const bool has_capacity = problem_.HasCapacity();
    for (int64_t i = begin; i < end; ++i) {
      if (has_capacity && pool_[i].start > 0) continue;  // has more rows than tokens
      const Sum one{pool_[i].num_tokens(), Work(pool_[i]), i, -1};
      sums->push_back(one);
      for (int64_t j = i + 1; j < end; ++j) {
        if (has_capacity && pool_[j].start > 0) continue;
        sums->push_back({one.tokens + pool_[j].num_tokens(), one.work + Work(pool_[j]), i, j});
      }
    }
    std::sort(sums->begin(), sums->end());
  }

  // The k shortest without `leaves`, plus `joins`.
  void TakeShortest(int64_t k, const Sum& joins, const Sum& leaves) {
    for (int64_t i : {joins.second, joins.first}) {
      if (i >= 0) Give(pool_.Take(i));
    }
    std::vector<Piece> stay;
    for (int64_t i = 0; i < k; ++i) {
      const Piece item = pool_.Take(0);
      if (i == leaves.first || i == leaves.second) {
        stay.push_back(item);
      } else {
        Give(item);
      }
    }
    for (const Piece& item : stay) pool_.Insert(item);
  }

  void TakeTail(const Piece& longest, int64_t from) {
    Give({from, longest.end, longest.document});
    if (from > longest.start) pool_.Insert({longest.start, from, longest.document});
  }

  // Takes this many tokens from the head of the shortest uncut document that is longer.
  void TakeHead(int64_t num) {
    while (num > 0) {
      int64_t i =
          FirstThat(0, pool_.size(), [&](int64_t i) { return pool_.Reach(pool_[i]) > num; });
      i = std::min(i, pool_.size() - 1);
      const auto is_unfit = [&](const Piece& item) {
        return item.start > 0 || item.num_tokens() <= num;
      };
      while (i + 1 < pool_.size() && is_unfit(pool_[i])) ++i;
      while (i > 0 && pool_[i].num_tokens() <= num) --i;
      Piece item = pool_.Take(i);
      const int64_t head = std::min(num, item.num_tokens());
      Give({item.start, item.start + head, item.document});
      item.start += head;
      if (item.num_tokens() > 0) pool_.Insert(item);
      num -= head;
    }
  }

  const PlacementProblem& problem_;
  const Closing closing_;
  std::vector<Concession>* concessions_;
  int64_t tokens_per_rank_;
  int64_t limit_ = 0;  // work of the rank being closed
  ItemPool pool_;
  std::vector<Piece> reserve_;
  int64_t padding_ = 0, work_left_ = 0, ranks_left_ = 0;
  int64_t factor_ = 1;
  uint64_t random_ = 0;
  RankPieces ranks_;
  std::vector<Piece>* pieces_ = nullptr;  // of the rank being closed
  std::vector<Sum> sums_, removals_;
};

}  // namespace cpd
