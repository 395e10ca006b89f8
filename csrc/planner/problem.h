// The problems of the planner: documents, ranks, the keys that queries see, and queries that move.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace cpd {

// ---- The query-key pairs of attention in one document, and the keys that a range of queries
// needs.

// A query at p attends to the tokens p - left, ..., p + right of its document; with chunks, to
// those of its chunk up to its own, or without limit to the right up to the end of its chunk. The
// fields are those of `Mask.pair_count` in Python.
struct PairCount {
  static constexpr int64_t kNoLimit = -1;

  int64_t left = kNoLimit;
  int64_t right = 0;
  int64_t chunk = 0;  // its tokens; 0: no chunks

  // Causal attention to the whole document.
  bool IsUnlimited() const { return left == kNoLimit && right == 0 && chunk == 0; }

  // No query attends to later tokens.
  bool IsCausal() const { return right == 0; }

  // Pairs of the queries [start, end) of a document of `length` tokens.
  int64_t operator()(int64_t start, int64_t end, int64_t length) const {
    if (IsUnlimited()) return (end * (end + 1) - start * (start + 1)) / 2;
    if (IsBlockCausal()) return UpToChunk(end, length) - UpToChunk(start, length);
    if (chunk > 0) return OfChunks(end) - OfChunks(start);
    return Before(end, length) - Before(start, length);
  }

  // The positions between which the pairs of a query only grow, stay or fall.
  std::vector<int64_t> Turns(int64_t length) const {
    if (IsBlockCausal()) return {};
    if (chunk > 0) {
      std::vector<int64_t> turns;
      for (int64_t at = chunk; at < length; at += chunk) turns.push_back(at);
      return turns;
    }
    const int64_t no_key_missing = left == kNoLimit ? length : left;
    const int64_t keys_missing = right == kNoLimit ? 0 : length - right;
    const auto [first, last] = std::minmax(no_key_missing, keys_missing);
    return {std::clamp<int64_t>(first, 0, length), std::clamp<int64_t>(last, 0, length)};
  }

  // The same attention if documents are read from their ends.
  PairCount Mirrored() const {
    PairCount mirrored;
    mirrored.left = right, mirrored.right = left;
    return mirrored;
  }

  // Whether a query attends to more tokens after than before itself.
  bool IsForward() const { return left != kNoLimit && (right == kNoLimit || right > left); }

  // The keys [FirstKey, LastKey) of these queries.
  int64_t FirstKey(int64_t start) const {
    if (chunk > 0 && !IsBlockCausal()) return start - start % chunk;
    return left == kNoLimit ? 0 : std::max<int64_t>(0, start - left);
  }
  int64_t LastKey(int64_t end, int64_t length) const {
    if (IsBlockCausal()) return std::min(length, (end + chunk - 1) / chunk * chunk);
    return right == kNoLimit ? length : std::min(length, end + right);
  }

 private:
  bool IsBlockCausal() const { return chunk > 0 && right == kNoLimit; }

  int64_t Before(int64_t end, int64_t length) const {
    const int64_t seen = right == kNoLimit ? end * length : UpTo(right, end, length);
    return left == kNoLimit ? seen : seen - UpTo(-left - 1, end, length);
  }

  // Pairs of the queries before `end`.
  int64_t OfChunks(int64_t end) const {
    return end / chunk * Triangle(chunk, chunk) + Triangle(end % chunk, end % chunk);
  }

  // Pairs of the queries before `end` with the keys up to the ends of their chunks.
  int64_t UpToChunk(int64_t end, int64_t length) const {
    const int64_t whole = end / chunk, fewer = std::min(whole, length / chunk);
    const int64_t keys = chunk * (fewer * (fewer + 1) / 2) + (whole - fewer) * length;
    return chunk * keys + end % chunk * std::min(length, (whole + 1) * chunk);
  }

  // Pairs with query < q, key < k and key <= query + ahead: a triangle that begins `ahead` queries
  // earlier, minus its part before the first query.
  static int64_t UpTo(int64_t ahead, int64_t q, int64_t k) {
    return Triangle(q + ahead, k) - Triangle(ahead, k);
  }
  static int64_t Triangle(int64_t q, int64_t k) {
    q = std::max<int64_t>(q, 0);
    const int64_t both = std::min(q, k);
    return both * (both + 1) / 2 + (q - both) * both;
  }
};

// The pairs of layers with several masks: each counts as often as layers use it. A rank needs the
// keys of all of them.
struct PairSum {
  struct Term {
    PairCount pairs;
    int64_t layers = 1;
  };

  std::vector<Term> terms;

  PairSum() : PairSum(PairCount()) {}
  PairSum(const PairCount& pairs) : terms{{pairs, 1}} {}  // NOLINT: one mask is a sum of one

  // One mask, causal attention to the whole document.
  bool IsUnlimited() const {
    return terms.size() == 1 && terms[0].layers == 1 && terms[0].pairs.IsUnlimited();
  }

  bool IsCausal() const {
    return std::all_of(terms.begin(), terms.end(),
                       [](const Term& x) { return x.pairs.IsCausal(); });
  }

  int64_t operator()(int64_t start, int64_t end, int64_t length) const {
    int64_t sum = 0;
    for (const Term& x : terms) sum += x.layers * x.pairs(start, end, length);
    return sum;
  }

  // Sorted; see `PairCount`.
  std::vector<int64_t> Turns(int64_t length) const {
    std::vector<int64_t> turns;
    for (const Term& x : terms) {
      for (int64_t turn : x.pairs.Turns(length)) turns.push_back(turn);
    }
    std::sort(turns.begin(), turns.end());
    return turns;
  }

  PairSum Mirrored() const {
    PairSum mirrored = *this;
    for (Term& x : mirrored.terms) x.pairs = x.pairs.Mirrored();
    return mirrored;
  }

  bool IsForward() const {
    return std::all_of(terms.begin(), terms.end(),
                       [](const Term& x) { return x.pairs.IsForward(); });
  }

  int64_t FirstKey(int64_t start) const {
    int64_t first = start;
    for (const Term& x : terms) first = std::min(first, x.pairs.FirstKey(start));
    return first;
  }
  int64_t LastKey(int64_t end, int64_t length) const {
    int64_t last = end;
    for (const Term& x : terms) last = std::max(last, x.pairs.LastKey(end, length));
    return last;
  }
};

// ---- What plans and placements have in common: documents, pieces, ranks, balance.

__extension__ typedef __int128 Wide;  // products of tokens, pairs, bytes and speeds

// The least x in [low, high) for which the monotonic predicate `holds` is true; `high` if there is
// none.
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

// Keeps the `num` of these indices with the smallest keys, in this order; of equal keys, smaller
// indices come first.
template <typename Index, typename Key>
void KeepSmallest(std::vector<Index>* indices, size_t num, const Key& key) {
  num = std::min(num, indices->size());
  std::partial_sort(indices->begin(), indices->begin() + num, indices->end(),
                    [&](Index a, Index b) {
                      const auto x = key(a), y = key(b);
                      return x != y ? x < y : a < b;
                    });
  indices->resize(num);
}

// Tokens [start, end) of a document.
struct Piece {
  int64_t start = 0;
  int64_t end = 0;
  int32_t document = 0;

  int64_t num_tokens() const { return end - start; }
};

// The pieces of each rank; missing tokens of a rank are padding.
using RankPieces = std::vector<std::vector<Piece>>;

// What each query sees under a mask that data decides: numbers of the queries of all documents, one
// document after another. Keys count from the start of the document.
struct QueryTable {
  std::vector<int64_t> first_query;   // of each document, in the lists below
  std::vector<int64_t> pairs_before;  // of all queries before each, and of all
  std::vector<int64_t> first_key;     // that the query sees, or a later one of its document
  std::vector<int64_t> last_key;      // one past the last that it sees, or an earlier one

  // Pairs of the queries [start, end) of a document.
  int64_t Pairs(int32_t document, int64_t start, int64_t end) const {
    const int64_t first = first_query[document];
    return pairs_before[first + end] - pairs_before[first + start];
  }

  // The keys [FirstKey, LastKey) contain all that these queries see; none if FirstKey is larger.
  int64_t FirstKey(int32_t document, int64_t start) const {
    return first_key[first_query[document] + start];
  }
  int64_t LastKey(int32_t document, int64_t end) const {
    return end == 0 ? 0 : last_key[first_query[document] + end - 1];
  }
};

// A problem is copied often, its table never; null: a mask of numbers, see `PairCount`.
using SharedTable = std::shared_ptr<const QueryTable>;

// The time of a row that moves, in all passes, as work that takes as long.
struct RowTime {
  int64_t inside = 0;   // a node
  int64_t between = 0;  // nodes
};

// How long a rank sends or receives on each kind of link: inside a node, and between nodes.
using LinkTimes = std::array<int64_t, 2>;

// The rows that a rank sends and receives on each kind of link.
struct LinkRows {
  std::array<int64_t, 2> sent{}, received{};

  void Add(const LinkRows& more) {
    for (int link : {0, 1}) sent[link] += more.sent[link], received[link] += more.received[link];
  }
  LinkTimes Times(const RowTime& of_row) const {
    return {of_row.inside * std::max(sent[0], received[0]),
            of_row.between * std::max(sent[1], received[1])};
  }
};

// An exchange before or after a pass of attention: its shares of all time.
struct ExchangeShare {
  static constexpr int64_t kAll = 1 << 20;

  int64_t work = kAll;  // of the pass
  int64_t keys = kAll;
  int64_t queries = kAll;

  static int64_t Of(int64_t time, int64_t share) {
    return static_cast<int64_t>(static_cast<Wide>(time) * share / kAll);
  }
};

struct PlannerProblem {
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;
  static constexpr int64_t kFewTokens = 512;  // in all, so that single ones decide about balance

  std::vector<int64_t> lengths;  // tokens of each document
  int32_t num_ranks = 1;
  PairSum pairs;
  SharedTable table;               // in place of `pairs`
  int64_t tolerance_ppm = 10'000;  // allowed excess of a rank over its share of the work
  std::vector<int64_t> speeds;  // relative speed of each rank, to which its share is proportional
  int32_t ranks_per_node = 1;   // consecutive ranks; all ranks, or 1, for no nodes
  int64_t block = 1;            // documents are cut at multiples of this, if possible
  RowTime key_time;  // of a key that moves; 0: few keys move, else the slowest rank ends early
  std::vector<ExchangeShare> exchanges{{}};  // of a step
  int64_t waiting = ExchangeShare::kAll;     // share of an exchange that is not beside attention

  int64_t Work(const Piece& piece) const {
    const int32_t document = piece.document;
    return table ? table->Pairs(document, piece.start, piece.end)
                 : pairs(piece.start, piece.end, lengths[document]);
  }
  int64_t WorkOf(const std::vector<Piece>& pieces) const {
    int64_t work = 0;
    for (const Piece& piece : pieces) work += Work(piece);
    return work;
  }
  // The keys that queries from `start` on, and up to `end`, see.
  int64_t FirstKey(int32_t document, int64_t start) const {
    return table ? table->FirstKey(document, start) : pairs.FirstKey(start);
  }
  int64_t LastKey(int32_t document, int64_t end) const {
    return table ? table->LastKey(document, end) : pairs.LastKey(end, lengths[document]);
  }
  // Calls `visit(document, first, last)` for the keys that sorted pieces need, each of them once.
  template <typename Visit>
  void ForEachNeed(const std::vector<Piece>& pieces, const Visit& visit) const {
    int64_t seen = 0;  // of this document: keys before this one are visited, or not needed
    int32_t document = -1;
    for (const Piece& piece : pieces) {
      if (piece.document != document) document = piece.document, seen = 0;
      const int64_t first = std::max(seen, FirstKey(document, piece.start));
      seen = std::max(seen, LastKey(document, piece.end));
      if (first < seen) visit(document, first, seen);
    }
  }
  // How long a rank waits for its exchanges. All but a share of each is hidden behind as much of
  // its pass: attention of A and an exchange of c, of which w waits, take max(A + w c, (1 - w) A +
  // c).
  int64_t Waits(int64_t work, const LinkTimes& keys, const LinkTimes& queries = {}) const {
    const auto part = ExchangeShare::Of;
    int64_t waits = 0;
    for (const ExchangeShare& x : exchanges) {
      int64_t time = 0;
      for (int link : {0, 1}) {
        time = std::max(time, part(keys[link], x.keys) + part(queries[link], x.queries));
      }
      waits += std::max(part(time, waiting), time - part(part(work, x.work), waiting));
    }
    return waits;
  }
  bool CountsTime() const { return key_time.inside > 0 || key_time.between > 0; }
  bool HasNodes() const { return ranks_per_node > 1 && ranks_per_node < num_ranks; }
  int32_t NodeOf(int32_t rank) const { return HasNodes() ? rank / ranks_per_node : 0; }
};

// ---- Which rank computes which queries of packed documents: nearly equal work, few moved bytes.

// Rank r holds columns [r * columns_per_rank, (r + 1) * columns_per_rank) of every batch row.
struct QueryProblem : PlannerProblem {
  std::vector<int64_t> columns;  // column of its batch row at which each document starts
  int64_t columns_per_rank = 1;
  // Bytes of a query and its output, and of a key and its value, in one unit.
  int64_t query_cost = 1;
  int64_t key_cost = 1;
  RowTime query_time;              // as `key_time`
  int64_t max_queries = kNoLimit;  // that a rank computes
  int64_t max_keys = kNoLimit;     // that a rank receives, its own included
  int64_t wanted_piece = 1;        // documents are cut into pieces of so many queries, if possible

  // Causal attention to the whole document.
  bool IsUnlimited() const { return !table && pairs.IsUnlimited(); }
  bool HasCapacities() const { return max_queries < kNoLimit || max_keys < kNoLimit; }
};

// The pieces that each rank computes. A rank receives each key that its queries need once. Uses
// integers only and a bounded number of steps: equal problems give equal results on every machine.
RankPieces MoveQueries(QueryProblem problem);

}  // namespace cpd
