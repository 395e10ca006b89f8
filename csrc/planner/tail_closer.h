// Closes a rank with the tail of a cut document, beside the shortest documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/closing_state.h"

namespace cpd {

class TailCloser : protected ClosingState {
 protected:
  using ClosingState::ClosingState;

  // The tail beside the cheapest tokens.
  bool FitsWhole(const Piece& item) const { return FitsWhole(item, Limit(item)); }

  // Whether it fits only because of a concession.
  bool NeedsMoreWork(const Piece& item) const {
    return Limit(item) > limit_ && !FitsWhole(item, limit_);
  }

  bool FitsWhole(const Piece& item, int64_t limit) const {
    int64_t room = tokens_per_rank_ - item.num_tokens();
    if (room < 0) return false;
    int64_t work = Work(item);
    room -= std::min(room, padding_);
    for (int64_t i = 0; room > 0 && i < pool_.size() && work <= limit; ++i) {
      const int64_t used = std::min(room, pool_[i].num_tokens());
      work += Work({pool_[i].start, pool_[i].start + used, pool_[i].document});
      room -= used;
    }
    return work <= limit;
  }

  // A document gives its tail, beside as few other tokens as the limit allows.
  bool CloseWithTail(int64_t index) {
    const Piece longest = pool_.Take(index);
    for (bool is_aligned : {true, false}) {
      is_aligned_ = is_aligned && problem_.block > 1;
      if ((is_aligned_ || !is_aligned) && CloseWithTailOf(longest)) return true;
    }
    pool_.Insert(longest);
    return false;
  }

  bool CloseWithTailOf(Piece longest) {
    const int64_t limit = Limit(longest);
    const int64_t first_fill = std::max<int64_t>(0, tokens_per_rank_ - longest.num_tokens());
    // The start of the tail that leaves room for this many other tokens.
    const auto start = [&](int64_t fill) { return longest.end - (tokens_per_rank_ - fill); };
    const auto fits = [&](int64_t fill, int64_t work) {
      const int64_t from = start(fill);
      return fill >= first_fill &&
             (from >= longest.end || Work({from, longest.end, longest.document}) + work <= limit);
    };
    const auto is_aligned = [&](int64_t fill) {
      return !is_aligned_ || start(fill) % problem_.block == 0;
    };
    const int64_t most = tokens_per_rank_;
    const int64_t used_padding = std::min(padding_, most - 1);  // the tail has at least one token
    int64_t pad = FirstThat(0, used_padding + 1, [&](int64_t x) { return fits(x, 0); });
    while (pad <= used_padding && !is_aligned(pad)) ++pad;
    if (pad <= used_padding) {
      TakeTail(longest, start(pad));
      padding_ -= pad;
      return true;
    }

    // Tokens of other documents are received rows, too.
    const int64_t most_others = std::min(
        most, problem_.max_received - Rows({0, longest.end, longest.document}) + used_padding + 1);

    // The shortest documents, up to the first with which the rest fits.
    const int64_t num = pool_.size();
    int64_t k = 0, tokens = used_padding, work = 0, more_rows = 0;  // than tokens
    bool is_closed = false;
    while (k < num && tokens + more_rows + Rows(pool_[k]) < most_others) {
      const int64_t next = tokens + pool_[k].num_tokens(), next_work = work + Work(pool_[k]);
      if (fits(next, next_work)) {
        if (!is_aligned(next)) break;
        is_closed = true;
        break;
      }
      more_rows += Rows(pool_[k]) - pool_[k].num_tokens();
      tokens = next, work = next_work, ++k;
    }
    int64_t best = is_closed ? tokens + pool_[k].num_tokens() : most_others;
    Sum joins{0, 0, is_closed ? k : -1, -1}, leaves;
    FindExchange(k, num, tokens, work, fits, is_aligned, &best, &joins, &leaves);
    if (joins.first < 0) best = most;

    const int64_t part = FindPart(longest, k, tokens, work, std::min(best, most_others), fits);
    if (part > 0 && is_aligned(tokens + part)) {
      padding_ -= used_padding;
      for (int64_t i = 0; i < k; ++i) Give(pool_.Take(0));
      Piece filler = pool_.Take(0);
      Give({filler.start, filler.start + part, filler.document});
      filler.start += part;
      pool_.Insert(filler);
      TakeTail(longest, start(tokens + part));
      return true;
    }

    // Or a slice from the head of the same document, whose keys this rank receives anyway.
    const int64_t most_slice = MostSlice(longest);
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
             fill + reserve_[i].num_tokens() < std::min(wanted, most_others) &&
             is_aligned(fill + reserve_[i].num_tokens());) {
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
        int64_t x = FirstThat(1, longest_slice + 1, [&](int64_t x) {
          return fits(fill + x,
                      fill_work + Work({longest.start, longest.start + x, longest.document}));
        });
        if (is_aligned_) x += problem_.block - 1 - (longest.start + x - 1) % problem_.block;
        if (x <= longest_slice && x <= most_slice && longest.start + x <= start(fill + x) &&
            is_aligned(fill + x)) {
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

  // With a longer slice, a rank that holds the rest of the document receives too many rows.
  int64_t MostSlice(const Piece& longest) const {
    const int64_t most = problem_.max_received - tokens_per_rank_;
    return FirstThat(0, longest.num_tokens(), [&](int64_t x) {
      const int64_t start = longest.start + x + 1;
      return start - problem_.pairs.FirstKey(start) > most;
    });
  }

  // The fewest tokens of the next document with which the tail fits, if that saves more keys than
  // both parts of this document need in common; else 0. For causal attention, a slice of the
  // longest document costs less.
  template <typename Fits>
  int64_t FindPart(const Piece& longest, int64_t k, int64_t tokens, int64_t work, int64_t best,
                   const Fits& fits) const {
    if (problem_.pairs.right == 0 || k >= pool_.size()) return 0;
    const Piece& filler = pool_[k];
    const int64_t last = std::min(best - tokens, filler.num_tokens());
    const auto head = [&](int64_t x) {
      return Piece{filler.start, filler.start + x, filler.document};
    };
    const int64_t x =
        FirstThat(1, last, [&](int64_t x) { return fits(tokens + x, work + Work(head(x))); });
    if (x >= last) return 0;
    const Piece rest{filler.start + x, filler.end, filler.document};
    const int64_t cost = Rows(head(x)) + Rows(rest) - Rows(filler);
    const int64_t fill = tokens + x;
    const int64_t tail = std::max<int64_t>(1, tokens_per_rank_ - fill);
    return (best - fill) * Rows(longest) / tail > cost ? x : 0;  // fewer ranks receive the longest
  }

  // Swaps up to two of the last documents that fit for one or two longer ones, with the fewest
  // tokens that fit.
  template <typename Fits, typename IsAligned>
  void FindExchange(int64_t k, int64_t num, int64_t tokens, int64_t work, const Fits& fits,
                    const IsAligned& is_aligned, int64_t* best, Sum* joins, Sum* leaves) {
    ListSums(k, std::min(num, k + kWindow), &sums_);
    const auto attempt = [&](const Sum& out) {
      const int64_t fill = tokens - out.tokens, fill_work = work - out.work;
      const auto take = [&](const Sum& in) {
        if (fill + in.tokens >= *best) return;
        *best = fill + in.tokens;
        *joins = in, *leaves = out;
      };
      const auto num_sums = static_cast<int64_t>(sums_.size());
      int64_t i = FirstThat(0, num_sums, [&](int64_t i) {
        return fits(fill + sums_[i].tokens, fill_work + sums_[i].work);
      });
      while (i < num_sums && !is_aligned(fill + sums_[i].tokens)) ++i;
      if (i < num_sums) take(sums_[i]);
      if (out.second >= 0) return;
      int64_t j = FirstThat(k, num, [&](int64_t j) {
        return fits(fill + pool_[j].num_tokens(), fill_work + Work(pool_[j]));
      });
      while (j < num && !is_aligned(fill + pool_[j].num_tokens())) ++j;
      if (j < num) take({pool_[j].num_tokens(), Work(pool_[j]), j, -1});
    };
    attempt({});
    ListSums(std::max<int64_t>(0, k - kWindow), k, &removals_);
    for (const Sum& out : removals_) attempt(out);
  }

  // No tail keeps the limit: only tokens count.
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

 private:
  static constexpr int64_t kWindow = 16;  // documents around the last that fits, for swaps
};

}  // namespace cpd
