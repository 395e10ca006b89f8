// A construction of placements: closes one rank after another, the longest remaining document
// first.
#include "planner/close_ranks.h"

#include "planner/whole_closer.h"

namespace cpd {
namespace {

class Closer : WholeCloser {
 public:
  Closer(const PlacementProblem& problem, const std::vector<Piece>& sorted, const Closing& closing)
      : WholeCloser(problem, sorted, closing) {}

  RankPieces Run() {
    const auto num_ranks = static_cast<int64_t>(ranks_.size());
    for (int64_t r = 0; r + 1 < num_ranks; ++r) {
      pieces_ = &ranks_[r];
      ranks_left_ = num_ranks - r;
      Vary();
      if (pool_.size() == 0) Release();
      if (pool_.size() == 0) break;
      if (CloseWithDense()) {
      } else if (!FitsWhole(pool_.back())) {
        if (!CloseWithTail(pool_.size() - 1)) {
          Release();
          if (!CloseWithTail(pool_.size() - 1)) CloseByTokens();
        }
      } else {
        Release();
        CloseWithWhole(work_left_ / ranks_left_, 0, 0);
      }
      for (const Piece& piece : *pieces_) work_left_ -= Work(piece);
    }
    Release();
    while (pool_.size() > 0) ranks_.back().push_back(pool_.Take(pool_.size() - 1));
    return std::move(ranks_);
  }

 private:
  // A document with about the work of a rank gets a rank of its own while there are short documents
  // to add: the less is cut off, the more a shorter document beside it saves.
  bool CloseWithDense() {
    if (closing_.dense_percent == 0) return false;
    for (int64_t i = pool_.size() - 1; i >= 0; --i) {
      const int64_t work = Work(pool_[i]);
      if (work <= limit_ / 100 * closing_.dense_percent) break;
      if (work > limit_ || pool_[i].start > 0) continue;
      if (!FitsWhole(pool_[i])) return CloseWithTail(i);
      const Piece item = pool_.Take(i);
      Give(item);
      CloseWithWhole(limit_, item.num_tokens(), work);
      return true;
    }
    return false;
  }
};

}  // namespace

RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& sorted,
                      const Closing& closing) {
  return Closer(problem, sorted, closing).Run();
}

}  // namespace cpd
