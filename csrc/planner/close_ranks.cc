// A construction of placements: closes one rank after another, the longest remaining document
// first.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "planner/placement.h"

namespace cpd {
namespace {

constexpr int64_t kMostPermille = 10'000'000;  // of the work limit
constexpr int64_t kWindow = 16;                // documents around the last that fits, for swaps
constexpr int64_t kDropped = 3;  // documents that a slice or a reserved one can replace
constexpr int64_t kTried = 64;   // candidates for the first of two documents

// ---- The unplaced items, ordered by the keys that their last query needs.

// A sorted array with room at both ends: most items are taken from the front, and cut pieces return
// near the back.
class ItemPool {
 public:
  ItemPool(const PlacementProblem& problem, const std::vector<Piece>& items)
      : problem_(problem), items_(items), last_(static_cast<int64_t>(items.size())) {
    std::sort(items_.begin(), items_.end(),
              [this](const Piece& a, const Piece& b) { return IsBefore(a, b); });
  }

  // Grows with the work per token. For whole documents it is the number of tokens.
  int64_t Reach(const Piece& item) const {
    return problem_.IsCausal() ? item.end : problem_.lengths[item.document];
  }

  int64_t size() const { return last_ - first_; }
  const Piece& operator[](int64_t i) const { return items_[first_ + i]; }
  const Piece& back() const { return items_[last_ - 1]; }

  Piece Take(int64_t i) {
    const Piece taken = items_[first_ + i];
    const auto place = items_.begin() + first_ + i;
    if (i < size() / 2) {
      std::move_backward(items_.begin() + first_, place, place + 1);
      ++first_;
    } else {
      std::move(place + 1, items_.begin() + last_, place);
      --last_;
    }
    return taken;
  }

  void Insert(const Piece& item) {
    const auto begin = items_.begin() + first_, end = items_.begin() + last_;
    const int64_t place =
        std::lower_bound(begin, end, item,
                         [this](const Piece& a, const Piece& b) { return IsBefore(a, b); }) -
        items_.begin();
    if (first_ > 0 && place - first_ < last_ - place) {
      std::move(items_.begin() + first_, items_.begin() + place, items_.begin() + first_ - 1);
      --first_;
      items_[place - 1] = item;
      return;
    }
    if (last_ == static_cast<int64_t>(items_.size())) items_.push_back({});
    std::move_backward(items_.begin() + place, items_.begin() + last_, items_.begin() + last_ + 1);
    ++last_;
    items_[place] = item;
  }

 private:
  bool IsBefore(const Piece& a, const Piece& b) const {
    const int64_t x = Reach(a), y = Reach(b);
    if (x != y) return x < y;
    return a.document != b.document ? a.document < b.document : a.end < b.end;
  }

  const PlacementProblem& problem_;
  std::vector<Piece> items_;
  int64_t first_ = 0;
  int64_t last_;
};

// ---- The ranks, closed one after another.

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

// The largest tail of a piece that leaves room for a number of other tokens, the fill.
struct Tail {
  const PlacementProblem& problem;
  Piece piece;  // the rest of the longest document
  int64_t limit = 0;
  int64_t tokens_per_rank = 0;
  bool is_aligned = false;  // whether it starts at a multiple of a block alone

  int64_t Start(int64_t fill) const { return piece.end - (tokens_per_rank - fill); }

  // Whether the tail keeps the limit beside so many tokens and their work.
  bool Fits(int64_t fill, int64_t work) const {
    const int64_t start = Start(fill);
    return start >= piece.start && fill >= 0 &&
           (start >= piece.end || problem.Work({start, piece.end, piece.document}) + work <= limit);
  }

  bool IsAligned(int64_t fill) const { return !is_aligned || Start(fill) % problem.block == 0; }

  // With a longer slice of its head, a rank that holds the rest of the document receives too many
  // rows.
  int64_t MostSlice() const {
    const int64_t most = problem.max_received - tokens_per_rank;
    return FirstThat(0, piece.num_tokens(), [&](int64_t x) {
      const int64_t start = piece.start + x + 1;
      return start - problem.FirstKey(piece.document, start) > most;
    });
  }
};

// Padding and the shortest documents beside a tail, and the best change of these so far.
struct Beside {
  int64_t padding = 0;
  int64_t most = 0;    // the fill stays below this
  int64_t num = 0;     // the shortest documents
  int64_t tokens = 0;  // of the padding and these
  int64_t work = 0;

  int64_t best = 0;     // the least fill with which the tail fits
  Sum joins, leaves;    // documents that reach it
  int64_t slice = 0;    // or tokens from the head of the longest document,
  int64_t kept = -1;    // or a reserved document,
  int64_t dropped = 0;  // in place of so many of the shortest
};

// Pieces that leave the rank, items that join it, and the tokens that are missing then.
struct Exchange {
  int64_t score = std::numeric_limits<int64_t>::max();
  bool is_kept = false;  // all limits are
  Sum out;
  int64_t first = -1, second = -1, rest = 0;
};

class Closer {
 public:
  Closer(const PlacementProblem& problem, const std::vector<Piece>& items, const Closing& closing,
         std::vector<Concession>* concessions)
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
      work_left_ -= problem_.WorkOf(*pieces_);
      speed_left -= speeds[order[i]];
    }
    Release();
    Open(order.back());
    while (pool_.size() > 0) Give(pool_.Take(pool_.size() - 1));
    return std::move(ranks_);
  }

 private:
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

  // ---- Closes a rank with the tail of a cut document, beside the shortest documents.

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

  // ---- Closes a rank with whole documents, exactly in tokens and close to a wanted work.

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

  // ---- The ways to close a rank.

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
  std::vector<Sum> cheapest_;
};

}  // namespace

RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& items,
                      const Closing& closing, std::vector<Concession>* concessions) {
  return Closer(problem, items, closing, concessions).Run();
}

}  // namespace cpd
