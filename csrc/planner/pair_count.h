// The query-key pairs of attention in one document, and the keys that a range of queries needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cpd {

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

}  // namespace cpd
