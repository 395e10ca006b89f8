// One way to place documents: close one rank after the other, the longest remains first.
#include "planner/close_ranks.h"

#include <algorithm>
#include <limits>

#include "planner/item_pool.h"

namespace cpd {
namespace {

constexpr int64_t kWindow = 16;   // documents on either side of the last that fits, to exchange
constexpr int64_t kTried = 64;    // documents tried as the first of two
constexpr int64_t kLeniency = 8;  // the work of so many mean tokens too much is as bad as one key

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

// The least x in [low, high) for which `holds`, which is true from some x on; `high` if for none.
template <typename Predicate>
int64_t FirstThat(int64_t low, int64_t high, const Predicate& holds) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (holds(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

class Closer {
 public:
  Closer(const PlacementProblem& problem, const std::vector<Piece>& sorted, const Closing& closing)
      : pairs_(problem.pairs),
        closing_(closing),
        tokens_per_rank_(problem.tokens_per_rank),
        limit_(WorkLimit(problem)),
        pool_(sorted) {
    padding_ = problem.num_ranks * problem.tokens_per_rank;
    for (const Piece& item : sorted) {
      padding_ -= item.num_tokens();
      work_left_ += Work(item);
    }
    ranks_.resize(problem.num_ranks);
    random_ = closing.seed;
    KeepBack(closing.reserve_percent * problem.num_ranks / 100);
  }

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
  int64_t Work(const Piece& piece) const { return pairs_(piece.start, piece.end); }

  // Both vary from rank to rank with a seed: 0, 1, 4 or 16 times what is given.
  int64_t SliceGain() const { return closing_.slice_gain * factor_; }

  int64_t Leniency() const { return kLeniency * (factor_ > 0 ? factor_ : 1); }

  void Vary() {
    if (closing_.seed == 0) return;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
    constexpr int64_t kFactors[] = {0, 1, 4, 16};
    factor_ = kFactors[random_ >> 62];
  }

  void Give(const Piece& piece) { pieces_->push_back(piece); }

  // Short documents of all lengths, with which later ranks are filled to the token.
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

  // A document of about the work of a rank gets one while there are short ones beside it: the less
  // is cut off, the more a shorter document beside it saves.
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

  // Beside the cheapest tokens there are.
  bool FitsWhole(const Piece& item) const {
    int64_t room = tokens_per_rank_ - item.num_tokens();
    if (room < 0) return false;
    int64_t work = Work(item);
    room -= std::min(room, padding_);
    for (int64_t i = 0; room > 0 && i < pool_.size() && work <= limit_; ++i) {
      const int64_t used = std::min(room, pool_[i].num_tokens());
      work += pairs_(pool_[i].start, pool_[i].start + used);
      room -= used;
    }
    return work <= limit_;
  }

  // A document gives its tail, beside as few other tokens as the limit allows.
  bool CloseWithTail(int64_t index) {
    const Piece longest = pool_.Take(index);
    if (CloseWithTailOf(longest)) return true;
    pool_.Insert(longest);
    return false;
  }

  bool CloseWithTailOf(Piece longest) {
    const int64_t first_fill = std::max<int64_t>(0, tokens_per_rank_ - longest.num_tokens());
    // Where the tail starts that leaves room for so many other tokens.
    const auto start = [&](int64_t fill) { return longest.end - (tokens_per_rank_ - fill); };
    const auto fits = [&](int64_t fill, int64_t work) {
      const int64_t from = start(fill);
      return fill >= first_fill &&
             (from >= longest.end || pairs_(from, longest.end) + work <= limit_);
    };
    const int64_t most = tokens_per_rank_;  // the tail has at least one token
    const int64_t pad =
        FirstThat(0, std::min(padding_, most - 1) + 1, [&](int64_t x) { return fits(x, 0); });
    if (pad <= std::min(padding_, most - 1)) {
      TakeTail(longest, start(pad));
      padding_ -= pad;
      return true;
    }
    const int64_t used_padding = std::min(padding_, most - 1);

    // The shortest documents, up to the first with which the rest fits.
    const int64_t num = pool_.size();
    int64_t k = 0, tokens = used_padding, work = 0;
    bool is_closed = false;
    while (k < num && tokens + pool_[k].num_tokens() < most) {
      const int64_t next = tokens + pool_[k].num_tokens(), next_work = work + Work(pool_[k]);
      if (fits(next, next_work)) {
        is_closed = true;
        break;
      }
      tokens = next, work = next_work, ++k;
    }
    int64_t best = is_closed ? tokens + pool_[k].num_tokens() : most;
    Sum joins{0, 0, is_closed ? k : -1, -1}, leaves;
    FindExchange(k, num, tokens, work, fits, &best, &joins, &leaves);

    // Or a slice from the head of the same document, whose keys come here anyhow.
    int64_t slice = 0, dropped = 0, kept = -1;
    {
      int64_t fill = tokens, fill_work = work;
      for (int64_t drop = 0; drop <= std::min<int64_t>(k, 3); ++drop) {
        if (drop > 0) {
          fill -= pool_[k - drop].num_tokens();
          fill_work -= Work(pool_[k - drop]);
        }
        const int64_t wanted = best - (slice > 0 || kept >= 0 ? 0 : SliceGain());
        for (int64_t i = FirstThat(0, reserve_.size(),
                                   [&](int64_t i) {
                                     return fits(fill + reserve_[i].num_tokens(),
                                                 fill_work + Work(reserve_[i]));
                                   });
             i < static_cast<int64_t>(reserve_.size()) &&
             fill + reserve_[i].num_tokens() < wanted;) {
          best = fill + reserve_[i].num_tokens();
          kept = i, slice = 0, dropped = drop;
          break;
        }
      }
      fill = tokens, fill_work = work;
      for (int64_t drop = 0; drop <= std::min<int64_t>(k, 3); ++drop) {
        if (drop > 0) {
          fill -= pool_[k - drop].num_tokens();
          fill_work -= Work(pool_[k - drop]);
        }
        const int64_t wanted = best - (slice > 0 ? 0 : SliceGain());
        const int64_t longest_slice = std::max<int64_t>(0, std::min(wanted, most) - 1 - fill);
        const int64_t x = FirstThat(1, longest_slice + 1, [&](int64_t x) {
          return fits(fill + x, fill_work + pairs_(longest.start, longest.start + x));
        });
        if (x <= longest_slice && longest.start + x <= start(fill + x)) {
          best = fill + x;
          slice = x, kept = -1, dropped = drop;
        }
      }
    }
    if (best >= most) return false;

    padding_ -= used_padding;
    if (kept >= 0) {
      Give(reserve_[kept]);
      reserve_.erase(reserve_.begin() + kept);
    }
    if (slice > 0) {
      Give({longest.start, longest.start + slice, longest.document});
      longest.start += slice;
    }
    if (slice > 0 || kept >= 0) {
      for (int64_t i = 0; i < k - dropped; ++i) Give(pool_.Take(0));
    } else {
      TakeShortest(k, joins, leaves);
    }
    TakeTail(longest, start(best));
    return true;
  }

  // Up to two of the last documents that fit for one or two longer ones: fewest tokens that do.
  template <typename Fits>
  void FindExchange(int64_t k, int64_t num, int64_t tokens, int64_t work, const Fits& fits,
                    int64_t* best, Sum* joins, Sum* leaves) {
    ListSums(k, std::min(num, k + kWindow), &sums_);
    const auto attempt = [&](const Sum& out) {
      const int64_t fill = tokens - out.tokens, fill_work = work - out.work;
      const auto take = [&](const Sum& in) {
        if (fill + in.tokens >= *best) return;
        *best = fill + in.tokens;
        *joins = in, *leaves = out;
      };
      const int64_t i = FirstThat(0, sums_.size(), [&](int64_t i) {
        return fits(fill + sums_[i].tokens, fill_work + sums_[i].work);
      });
      if (i < static_cast<int64_t>(sums_.size())) take(sums_[i]);
      if (out.second >= 0) return;
      const int64_t j = FirstThat(k, num, [&](int64_t j) {
        return fits(fill + pool_[j].num_tokens(), fill_work + Work(pool_[j]));
      });
      if (j < num) take({pool_[j].num_tokens(), Work(pool_[j]), j, -1});
    };
    attempt({});
    ListSums(std::max<int64_t>(0, k - kWindow), k, &removals_);
    for (const Sum& out : removals_) attempt(out);
  }

  // One or two of the items [begin, end), ascending.
  void ListSums(int64_t begin, int64_t end, std::vector<Sum>* sums) const {
    sums->clear();
    for (int64_t i = begin; i < end; ++i) {
      const Sum one{pool_[i].num_tokens(), Work(pool_[i]), i, -1};
      sums->push_back(one);
      for (int64_t j = i + 1; j < end; ++j) {
        sums->push_back({one.tokens + pool_[j].num_tokens(), one.work + Work(pool_[j]), i, j});
      }
    }
    std::sort(sums->begin(), sums->end());
  }

  // The k shortest without `leaves`, and `joins`.
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

  // No tail keeps the limit: tokens alone decide.
  void CloseByTokens() {
    const Piece longest = pool_.Take(pool_.size() - 1);
    TakeTail(longest, std::max(longest.start, longest.end - tokens_per_rank_));
    FillShortest(tokens_per_rank_ - pieces_->back().num_tokens());
  }

  void FillShortest(int64_t room) {
    const int64_t pad = std::min(room, padding_);
    padding_ -= pad, room -= pad;
    while (room > 0) {
      if (pool_[0].num_tokens() <= room) {
        Give(pool_.Take(0));
        room -= pieces_->back().num_tokens();
      } else {
        TakeHead(room);
        room = 0;
      }
    }
  }

  // So many tokens from the head of a document: the shortest uncut one that has more.
  void TakeHead(int64_t num) {
    while (num > 0) {
      int64_t i = FirstThat(0, pool_.size(), [&](int64_t i) { return pool_[i].end > num; });
      i = std::min(i, pool_.size() - 1);
      while (i + 1 < pool_.size() && (pool_[i].start > 0 || pool_[i].num_tokens() <= num)) ++i;
      while (i > 0 && pool_[i].num_tokens() <= num) --i;
      Piece item = pool_.Take(i);
      const int64_t head = std::min(num, item.num_tokens());
      Give({item.start, item.start + head, item.document});
      item.start += head;
      if (item.num_tokens() > 0) pool_.Insert(item);
      num -= head;
    }
  }

  // The longest that leave room for the shortest, then these, to the token.
  void CloseWithWhole(int64_t mean, int64_t used_tokens, int64_t used_work) {
    const int64_t target = std::min(limit_, mean);
    // So much less leaves the other ranks a mean well below the limit.
    const int64_t less = (limit_ - target) * (ranks_left_ - 1) / 8;
    int64_t room = tokens_per_rank_ - used_tokens, work = target - used_work;
    ListCheapest();
    while (room > 0 && pool_.size() > 0) {
      const int64_t num = FirstThat(0, pool_.size(), [&](int64_t i) {
        const int64_t tokens = pool_[i].num_tokens();
        return tokens > room || Work(pool_[i]) + Cheapest(room - tokens) > work;
      });
      if (num == 0) break;
      const Piece item = pool_.Take(num - 1);
      Give(item);
      room -= item.num_tokens(), work -= Work(item);
    }
    if (room > 0) FillExactly(room, work - less, work + limit_ - target, work);
  }

  void ListCheapest() {
    cheapest_.assign(1, {});
    Sum sum;
    for (int64_t i = 0; i < pool_.size() && sum.tokens < tokens_per_rank_; ++i) {
      sum.tokens += pool_[i].num_tokens();
      sum.work += Work(pool_[i]);
      cheapest_.push_back(sum);
    }
  }

  // Work of the so many cheapest tokens: padding, the shortest documents, the head of the next.
  int64_t Cheapest(int64_t tokens) const {
    tokens -= std::min(tokens, padding_);
    const auto above =
        std::upper_bound(cheapest_.begin() + 1, cheapest_.end(), tokens,
                         [](int64_t tokens, const Sum& sum) { return tokens < sum.tokens; });
    const Sum& sum = *(above - 1);
    return sum.work + pairs_(tokens - sum.tokens);
  }

  // The shortest documents into the room; then, for the tokens that are still missing, one document
  // of the rank for one or two others, near the wanted work; at last a head.
  void FillExactly(int64_t room, int64_t least_work, int64_t most_work, int64_t wanted_work) {
    const int64_t pad = std::min(room, padding_);
    padding_ -= pad, room -= pad;
    while (room > 0) {
      if (pool_.size() == 0) Release();
      if (pool_[0].num_tokens() > room) break;
      Give(pool_.Take(0));
      room -= pieces_->back().num_tokens();
      const int64_t given = Work(pieces_->back());
      least_work -= given, wanted_work -= given, most_work -= given;
    }
    if (room == 0) return;

    struct Exchange {
      int64_t score = std::numeric_limits<int64_t>::max();
      int64_t out = -1, first = -1, second = -1, rest = 0;
    } best;
    best.rest = room;
    const int64_t work_per_token = std::max<int64_t>(1, limit_ / tokens_per_rank_);
    const auto num_pieces = static_cast<int64_t>(pieces_->size());
    for (int64_t out = -1; out < num_pieces && best.score > 0; ++out) {
      if (out >= 0 && (*pieces_)[out].start > 0) continue;
      const int64_t gap = room + (out < 0 ? 0 : (*pieces_)[out].num_tokens());
      const int64_t freed = out < 0 ? 0 : Work((*pieces_)[out]);
      const auto last_within = [&](int64_t tokens) {
        return FirstThat(0, pool_.size(), [&](int64_t i) { return pool_[i].end > tokens; }) - 1;
      };
      const auto consider = [&](int64_t first, int64_t second) {
        int64_t rest = gap, work = -freed;
        for (int64_t i : {first, second}) {
          if (i < 0) continue;
          if (pool_[i].start > 0) return;
          rest -= pool_[i].num_tokens(), work += Work(pool_[i]);
        }
        if (rest < 0 || (work > most_work && out >= 0)) return;
        const int64_t off = std::abs(work - wanted_work) / work_per_token;
        const int64_t lacks = std::max<int64_t>(0, least_work - work) / work_per_token;
        const int64_t score = rest + off / Leniency() + lacks;
        if (score < best.score) best = {score, out, first, second, rest};
      };
      if (out < 0) consider(-1, -1);
      const int64_t num = last_within(gap) + 1;
      for (int64_t i = num - 1; i >= std::max<int64_t>(0, num - 2); --i) consider(i, -1);
      const int64_t stride = std::max<int64_t>(1, num / kTried);
      for (int64_t i = 0; i < num; i += stride) {
        const int64_t j = last_within(gap - pool_[i].num_tokens());
        for (int64_t other = j; other > std::max<int64_t>(i, j - 2); --other) consider(i, other);
      }
    }
    if (best.out >= 0 || best.first >= 0) {
      for (int64_t i : {best.second, best.first}) {  // the second stands behind the first
        if (i >= 0) Give(pool_.Take(i));
      }
      if (best.out >= 0) {
        pool_.Insert((*pieces_)[best.out]);
        pieces_->erase(pieces_->begin() + best.out);
      }
    }
    TakeHead(best.rest);
  }

  const PairCount pairs_;
  const Closing closing_;
  const int64_t tokens_per_rank_, limit_;
  ItemPool pool_;
  std::vector<Piece> reserve_;
  int64_t padding_ = 0, work_left_ = 0, ranks_left_ = 0;
  int64_t factor_ = 1;
  uint64_t random_ = 0;
  RankPieces ranks_;
  std::vector<Piece>* pieces_ = nullptr;  // of the rank that is being closed
  std::vector<Sum> sums_, removals_, cheapest_;
};

}  // namespace

RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& sorted,
                      const Closing& closing) {
  return Closer(problem, sorted, closing).Run();
}

}  // namespace cpd
