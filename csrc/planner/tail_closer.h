// Closes a rank with the tail of a cut document, beside the shortest documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/closing_state.h"
#include "planner/tail.h"

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
      if (is_aligned && problem_.block == 1) continue;
      if (CloseWith({problem_, longest, Limit(longest), tokens_per_rank_, is_aligned})) return true;
    }
    pool_.Insert(longest);
    return false;
  }

  // No tail keeps the limit: only tokens count.
  void CloseByTokens() {
    const Piece longest = pool_.Take(pool_.size() - 1);
    TakeTail(longest, std::max(longest.start, longest.end - tokens_per_rank_));
    FillShortest(tokens_per_rank_ - pieces_->back().num_tokens());
  }

 private:
  static constexpr int64_t kWindow = 16;  // documents around the last that fits, for swaps
  static constexpr int64_t kDropped = 3;  // documents that a slice or a reserved one can replace

  bool CloseWith(const Tail& tail) {
    Beside beside;
    beside.padding = std::min(padding_, tokens_per_rank_ - 1);  // the tail has at least one token
    if (CloseWithPadding(tail, beside.padding)) return true;
    // Tokens of other documents are received rows, too.
    const int64_t rows = Rows({0, tail.piece.end, tail.piece.document});
    beside.most = std::min(tokens_per_rank_, problem_.max_received - rows + beside.padding + 1);
    FindShortest(tail, &beside);
    FindExchange(tail, &beside);
    if (beside.joins.first < 0) beside.best = tokens_per_rank_;
    if (CloseWithPart(tail, beside)) return true;
    FindReserved(tail, &beside);
    FindSlice(tail, &beside);
    if (beside.best >= tokens_per_rank_) return false;
    Take(tail, beside);
    return true;
  }

  bool CloseWithPadding(const Tail& tail, int64_t most) {
    int64_t pad = FirstThat(0, most + 1, [&](int64_t x) { return tail.Fits(x, 0); });
    while (pad <= most && !tail.IsAligned(pad)) ++pad;
    if (pad > most) return false;
    TakeTail(tail.piece, tail.Start(pad));
    padding_ -= pad;
    return true;
  }

  // The shortest documents, up to the first with which the tail fits.
  void FindShortest(const Tail& tail, Beside* beside) const {
    beside->tokens = beside->padding, beside->best = beside->most;
    int64_t more_rows = 0;  // than tokens
    for (int64_t& i = beside->num; i < pool_.size(); ++i) {
      if (beside->tokens + more_rows + Rows(pool_[i]) >= beside->most) return;
      const int64_t tokens = beside->tokens + pool_[i].num_tokens();
      const int64_t work = beside->work + Work(pool_[i]);
      if (tail.Fits(tokens, work)) {
        if (tail.IsAligned(tokens)) beside->best = tokens, beside->joins.first = i;
        return;
      }
      more_rows += Rows(pool_[i]) - pool_[i].num_tokens();
      beside->tokens = tokens, beside->work = work;
    }
  }

  // Swaps up to two of the last documents that fit for one or two longer ones, with the fewest
  // tokens that fit.
  void FindExchange(const Tail& tail, Beside* beside) {
    const int64_t k = beside->num, num = pool_.size();
    ListSums(k, std::min(num, k + kWindow), &sums_);
    const auto attempt = [&](const Sum& out) {
      const int64_t fill = beside->tokens - out.tokens, fill_work = beside->work - out.work;
      const auto take = [&](const Sum& in) {
        if (fill + in.tokens >= beside->best) return;
        beside->best = fill + in.tokens;
        beside->joins = in, beside->leaves = out;
      };
      const auto num_sums = static_cast<int64_t>(sums_.size());
      int64_t i = FirstThat(0, num_sums, [&](int64_t i) {
        return tail.Fits(fill + sums_[i].tokens, fill_work + sums_[i].work);
      });
      while (i < num_sums && !tail.IsAligned(fill + sums_[i].tokens)) ++i;
      if (i < num_sums) take(sums_[i]);
      if (out.second >= 0) return;
      int64_t j = FirstThat(k, num, [&](int64_t j) {
        return tail.Fits(fill + pool_[j].num_tokens(), fill_work + Work(pool_[j]));
      });
      while (j < num && !tail.IsAligned(fill + pool_[j].num_tokens())) ++j;
      if (j < num) take({pool_[j].num_tokens(), Work(pool_[j]), j, -1});
    };
    attempt({});
    ListSums(std::max<int64_t>(0, k - kWindow), k, &removals_);
    for (const Sum& out : removals_) attempt(out);
  }

  // The fewest tokens of the next document with which the tail fits, if that saves more keys than
  // both parts of this document need in common. For causal attention, a slice of the longest
  // document costs less.
  bool CloseWithPart(const Tail& tail, const Beside& beside) {
    if (problem_.IsCausal() || beside.num >= pool_.size()) return false;
    const Piece filler = pool_[beside.num];
    const auto head = [&](int64_t x) {
      return Piece{filler.start, filler.start + x, filler.document};
    };
    const int64_t best = std::min(beside.best, beside.most);
    const int64_t last = std::min(best - beside.tokens, filler.num_tokens());
    const int64_t part = FirstThat(1, last, [&](int64_t x) {
      return tail.Fits(beside.tokens + x, beside.work + Work(head(x)));
    });
    const int64_t fill = beside.tokens + part;
    if (part >= last || !tail.IsAligned(fill)) return false;
    const Piece rest{filler.start + part, filler.end, filler.document};
    const int64_t cost = Rows(head(part)) + Rows(rest) - Rows(filler);
    const int64_t tokens = std::max<int64_t>(1, tokens_per_rank_ - fill);
    // Fewer ranks receive the longest document.
    if ((best - fill) * Rows(tail.piece) / tokens <= cost) return false;
    padding_ -= beside.padding;
    for (int64_t i = 0; i < beside.num; ++i) Give(pool_.Take(0));
    pool_.Take(0);
    Give(head(part));
    pool_.Insert(rest);
    TakeTail(tail.piece, tail.Start(fill));
    return true;
  }

  // A reserved document in place of the last of the shortest.
  void FindReserved(const Tail& tail, Beside* beside) const {
    const auto num = static_cast<int64_t>(reserve_.size());
    ForEachDrop(*beside, [&](int64_t dropped, int64_t fill, int64_t work) {
      const int64_t least_gain = beside->kept >= 0 ? 0 : SliceGain();
      const int64_t i = FirstThat(0, num, [&](int64_t i) {
        return tail.Fits(fill + reserve_[i].num_tokens(), work + Work(reserve_[i]));
      });
      if (i == num) return;
      const int64_t reached = fill + reserve_[i].num_tokens();
      if (reached >= std::min(beside->best - least_gain, beside->most)) return;
      if (!tail.IsAligned(reached)) return;
      beside->best = reached, beside->kept = i, beside->dropped = dropped;
    });
  }

  // Or a slice from the head of the same document, whose keys this rank receives anyway.
  void FindSlice(const Tail& tail, Beside* beside) const {
    const int64_t most_slice = tail.MostSlice(), first = tail.piece.start;
    ForEachDrop(*beside, [&](int64_t dropped, int64_t fill, int64_t work) {
      const int64_t least_gain = beside->slice > 0 ? 0 : SliceGain();
      const int64_t wanted = std::min(beside->best - least_gain, tokens_per_rank_);
      const int64_t longest = std::max<int64_t>(0, wanted - 1 - fill);
      int64_t x = FirstThat(1, longest + 1, [&](int64_t x) {
        return tail.Fits(fill + x, work + Work({first, first + x, tail.piece.document}));
      });
      if (tail.is_aligned) x += problem_.block - 1 - (first + x - 1) % problem_.block;
      if (x > std::min(longest, most_slice) || first + x > tail.Start(fill + x)) return;
      if (!tail.IsAligned(fill + x)) return;
      beside->best = fill + x;
      beside->slice = x, beside->kept = -1, beside->dropped = dropped;
    });
  }

  // Calls `visit(dropped, tokens, work)` without none, and the last few, of the shortest documents.
  template <typename Visit>
  void ForEachDrop(const Beside& beside, const Visit& visit) const {
    int64_t tokens = beside.tokens, work = beside.work;
    for (int64_t drop = 0; drop <= std::min(beside.num, kDropped); ++drop) {
      if (drop > 0) {
        tokens -= pool_[beside.num - drop].num_tokens();
        work -= Work(pool_[beside.num - drop]);
      }
      visit(drop, tokens, work);
    }
  }

  void Take(const Tail& tail, const Beside& beside) {
    Piece rest = tail.piece;
    padding_ -= beside.padding;
    if (beside.kept >= 0) {
      Give(reserve_[beside.kept]);
      reserve_.erase(reserve_.begin() + beside.kept);
    }
    if (beside.slice > 0) {
      Give({rest.start, rest.start + beside.slice, rest.document});
      rest.start += beside.slice;
    }
    if (beside.slice > 0 || beside.kept >= 0) {
      for (int64_t i = 0; i < beside.num - beside.dropped; ++i) Give(pool_.Take(0));
    } else {
      TakeShortest(beside.num, beside.joins, beside.leaves);
    }
    TakeTail(rest, tail.Start(beside.best));
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
};

}  // namespace cpd
