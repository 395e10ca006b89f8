// A construction of placements: closes one rank after another, the longest remaining document
// first.
#include <algorithm>
#include <numeric>

#include "planner/placement_steps.h"
#include "planner/whole_closer.h"

namespace cpd {
namespace {

constexpr int64_t kMostPermille = 10'000'000;  // of the work limit

class Closer : WholeCloser {
 public:
  Closer(const PlacementProblem& problem, const std::vector<Piece>& items, const Closing& closing,
         std::vector<Concession>* concessions)
      : WholeCloser(problem, items, closing, concessions) {}

  RankPieces Run() {
    std::vector<int32_t> order(problem_.num_ranks);
    std::iota(order.begin(), order.end(), 0);
    const std::vector<int64_t>& speeds = problem_.speeds;
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return speeds[a] > speeds[b]; });
    int64_t speed_left = std::accumulate(speeds.begin(), speeds.end(), static_cast<int64_t>(0));
    for (int64_t i = 0; i + 1 < problem_.num_ranks; ++i) {
      ranks_left_ = problem_.num_ranks - i;
      Open(order[i]);
      Vary();
      if (pool_.size() == 0) Release();
      if (pool_.size() == 0) break;
      if (CloseWithDense()) {
      } else if (!FitsWhole(pool_.back())) {
        if (!CloseWithTail(pool_.size() - 1)) {
          Release();
          if (!CloseWithTail(pool_.size() - 1) && !CloseWithMoreWork()) CloseByTokens();
        }
      } else if (NeedsMoreWork(pool_.back())) {
        Release();
        CloseWithPiece(pool_.size() - 1);
      } else {
        Release();
        const Wide share = static_cast<Wide>(work_left_) * speeds[order[i]] / speed_left;
        CloseWithRest(static_cast<int64_t>(share));
      }
      for (const Piece& piece : *pieces_) work_left_ -= Work(piece);
      speed_left -= speeds[order[i]];
    }
    Release();
    Open(order.back());
    while (pool_.size() > 0) Give(pool_.Take(pool_.size() - 1));
    return std::move(ranks_);
  }

 private:
  // A tail with as little work above the limit as possible.
  bool CloseWithMoreWork() {
    if (concessions_ == nullptr) return false;
    const Piece longest = pool_.back();
    Concession& concession = (*concessions_)[longest.document];
    const int64_t given = concession.work_permille;
    bool is_closed = false;
    while (!is_closed && concession.work_permille < kMostPermille) {
      concession.work_permille += concession.work_permille / 20;
      is_closed =
          FitsWhole(longest) ? CloseWithPiece(pool_.size() - 1) : CloseWithTail(pool_.size() - 1);
    }
    concession.needed_permille = std::max(concession.needed_permille, concession.work_permille);
    concession.work_permille = given;
    return is_closed;
  }

  // Whole documents; before them the densest one, if it is what is left of a cut document. (Where
  // queries attend to later keys, the head of a document is as dense as its tail.)
  void CloseWithRest(int64_t share) {
    const Piece rest = pool_.back();
    if (problem_.IsCausal() || rest.num_tokens() == problem_.lengths[rest.document]) {
      CloseWithWhole(share, 0, 0);
      return;
    }
    Give(pool_.Take(pool_.size() - 1));
    const bool is_next_whole = pool_.size() == 0 || FitsWhole(pool_.back());  // on another rank
    tokens_per_rank_ -= rest.num_tokens(), limit_ -= Work(rest);
    const bool is_open = pool_.size() > 0 && tokens_per_rank_ > 0;
    if (is_open && (is_next_whole || !CloseWithTail(pool_.size() - 1))) {
      CloseWithWhole(share - Work(rest), 0, 0);
    }
    tokens_per_rank_ += rest.num_tokens();
  }

  // A piece that may need more work than the limit, beside the shortest documents.
  bool CloseWithPiece(int64_t index) {
    const Piece piece = pool_.Take(index);
    Give(piece);
    int64_t room = tokens_per_rank_ - piece.num_tokens();
    ListCheapest();
    const int64_t work = std::max<int64_t>(limit_ - Work(piece), Cheapest(room));
    if (room > 0) FillExactly(room, 0, work, Cheapest(room));
    return true;
  }

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

RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& items,
                      const Closing& closing, std::vector<Concession>* concessions) {
  return Closer(problem, items, closing, concessions).Run();
}

}  // namespace cpd
