// Closes a rank with whole documents, exactly in tokens and close to a wanted work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "planner/tail_closer.h"

namespace cpd {

class WholeCloser : protected TailCloser {
 protected:
  using TailCloser::TailCloser;

  // The longest documents that leave room for the shortest, then these, to the token.
  void CloseWithWhole(int64_t mean, int64_t used_tokens, int64_t used_work) {
    const int64_t target = std::min(limit_, mean);
    ListCheapest();
    // This much less leaves the other ranks a mean well below the limit.
    const int64_t less = (limit_ - target) * (ranks_left_ - 1) / 8;
    int64_t room = tokens_per_rank_ - used_tokens, work = target - used_work;
    int64_t rows = problem_.max_received;
    for (const Piece& piece : *pieces_) rows -= Rows(piece);
    while (room > 0 && pool_.size() > 0) {
      const int64_t num = FirstThat(0, pool_.size(), [&](int64_t i) {
        const int64_t tokens = pool_[i].num_tokens();
        return tokens > room || Work(pool_[i]) + Cheapest(room - tokens) > work;
      });
      // The rest of the room receives at least its own rows. Longer documents than a cut one come
      // before it.
      const auto fits = [&](const Piece& item) {
        const int64_t rest = room - item.num_tokens();
        return rest >= 0 && Work(item) + Cheapest(rest) <= work && Rows(item) + rest <= rows;
      };
      int64_t i = num - 1;
      while (i >= 0 && !fits(pool_[i])) --i;
      if (i < 0) break;
      const Piece item = pool_.Take(i);
      Give(item);
      room -= item.num_tokens(), work -= Work(item), rows -= Rows(item);
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

  // The work of the given number of cheapest tokens: padding, the shortest documents, the head of
  // the next.
  int64_t Cheapest(int64_t tokens) const {
    tokens -= std::min(tokens, padding_);
    const auto above =
        std::upper_bound(cheapest_.begin() + 1, cheapest_.end(), tokens,
                         [](int64_t tokens, const Sum& sum) { return tokens < sum.tokens; });
    const Sum& sum = *(above - 1);
    const int64_t next = above - cheapest_.begin() - 1, head = tokens - sum.tokens;
    if (next >= pool_.size()) {  // more tokens than there are: as causal ones of a document
      return sum.work + (problem_.table ? head : problem_.pairs(0, head, head));
    }
    const Piece& item = pool_[next];
    if (problem_.table) {
      const int64_t end = std::min(item.start + head, item.end);
      return sum.work + problem_.Work({item.start, end, item.document});
    }
    return sum.work + problem_.pairs(0, head, std::max(head, problem_.lengths[item.document]));
  }

  // Fills the room with the shortest documents. For the missing tokens, swaps one document of the
  // rank for one or two others, close to the wanted work; finally takes a head.
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

    Exchange best;
    best.rest = room;
    const int64_t work_per_token = std::max<int64_t>(1, limit_ / tokens_per_rank_);
    const auto last_within = [&](int64_t tokens) {
      return FirstThat(0, pool_.size(), [&](int64_t i) { return pool_.Reach(pool_[i]) > tokens; }) -
             1;
    };
    const auto consider = [&](const Sum& out, int64_t first, int64_t second) {
      int64_t rest = room + out.tokens, work = -out.work;
      for (int64_t i : {first, second}) {
        if (i < 0) continue;
        if (pool_[i].start > 0) return;
        rest -= pool_[i].num_tokens(), work += Work(pool_[i]);
      }
      if (rest < 0 || (work > most_work && out.first >= 0)) return;
      const int64_t off = std::abs(work - wanted_work) / work_per_token;
      const int64_t lacks = std::max<int64_t>(0, least_work - work) / work_per_token;
      const bool is_kept = CanTakeHead(rest);
      const int64_t score = rest + off / Leniency() + lacks + (is_kept ? 0 : tokens_per_rank_);
      if (score < best.score) best = {score, is_kept, out, first, second, rest};
    };
    const auto num_pieces = static_cast<int64_t>(pieces_->size());
    const auto is_whole = [&](int64_t i) { return (*pieces_)[i].start == 0; };
    for (int64_t p = -1; p < num_pieces && best.score > 0; ++p) {
      if (p >= 0 && !is_whole(p)) continue;
      const Sum out = p < 0 ? Sum{} : SumOf(p, -1);
      const int64_t gap = room + out.tokens;
      if (p < 0) consider(out, -1, -1);
      const int64_t num = last_within(gap) + 1;
      for (int64_t i = num - 1; i >= std::max<int64_t>(0, num - 2); --i) consider(out, i, -1);
      const int64_t stride = std::max<int64_t>(1, num / kTried);
      for (int64_t i = 0, j = num - 1; i < j; i += stride) {
        // Of the others, none is shorter than those before it. If queries also attend to later
        // keys, the head of a cut document may be: then some pairs are passed over.
        if (pool_[i].start > 0) continue;
        j = LastWithin(j, gap - pool_[i].num_tokens());
        for (int64_t other = j; other > std::max<int64_t>(i, j - 2); --other) {
          consider(out, i, other);
        }
      }
    }
    for (int64_t p = 0; p < num_pieces && !best.is_kept; ++p) {  // two for two
      for (int64_t q = p + 1; q < num_pieces; ++q) {
        if (!is_whole(p) || !is_whole(q)) continue;
        const Sum out = SumOf(p, q);
        int64_t i = 0, j = last_within(room + out.tokens);
        while (i < j) {
          const int64_t rest = room + out.tokens - pool_.Reach(pool_[i]) - pool_.Reach(pool_[j]);
          if (rest >= 0 && CanTakeHead(rest)) consider(out, i, j);
          if (rest < 0) {
            --j;
          } else {
            ++i;
          }
        }
      }
    }
    Apply(best);
  }

 private:
  // Pieces that leave the rank, items that join it, and the tokens that are missing then.
  struct Exchange {
    int64_t score = std::numeric_limits<int64_t>::max();
    bool is_kept = false;  // all limits are
    Sum out;
    int64_t first = -1, second = -1, rest = 0;
  };

  // The last item, at most the given one, that has at most so many tokens; -1 if there is none.
  // Found in few steps if it is near the given one.
  int64_t LastWithin(int64_t item, int64_t tokens) const {
    const auto is_longer = [&](int64_t i) { return pool_.Reach(pool_[i]) > tokens; };
    int64_t low = item + 1, high = low;
    for (int64_t step = 1; low > 0 && is_longer(low - 1); step *= 2) {
      high = low;
      low = std::max<int64_t>(0, low - step);
    }
    return FirstThat(low, high, is_longer) - 1;
  }

  Sum SumOf(int64_t p, int64_t q) const {
    Sum sum{0, 0, p, q};
    for (int64_t i : {p, q}) {
      if (i < 0) continue;
      sum.tokens += (*pieces_)[i].num_tokens(), sum.work += Work((*pieces_)[i]);
    }
    return sum;
  }

  // Whether this many tokens may be cut off another document.
  bool CanTakeHead(int64_t num) const {
    if (num == 0) return true;
    return num % problem_.block == 0 && num <= problem_.max_received - problem_.tokens_per_rank;
  }

  void Apply(const Exchange& exchange) {
    for (int64_t i : {exchange.second, exchange.first}) {  // the second comes after the first
      if (i >= 0) Give(pool_.Take(i));
    }
    for (int64_t i : {exchange.out.second, exchange.out.first}) {
      if (i < 0) continue;
      pool_.Insert((*pieces_)[i]);
      pieces_->erase(pieces_->begin() + i);
    }
    TakeHead(exchange.rest);
  }

  static constexpr int64_t kTried = 64;  // candidates for the first of two documents
  std::vector<Sum> cheapest_;
};

}  // namespace cpd
