// The query-key pairs of attention in one document, and the keys that a range of queries needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace cpd {

// A query at p attends to the tokens p - left, ..., p + right of its document.
struct PairCount {
  static constexpr int64_t kNoLimit = -1;

  int64_t left = kNoLimit;
  int64_t right = 0;

  // Attention to the last `window` tokens up to the query, its own included; 0: to all of them.
  static PairCount Causal(int64_t window) {
    PairCount pairs;
    if (window > 0) pairs.left = window - 1;
    return pairs;
  }

  // Causal attention without a window.
  bool IsUnlimited() const { return left == kNoLimit && right == 0; }

  // Pairs of the queries [start, end), if no query attends to later tokens.
  int64_t operator()(int64_t start, int64_t end) const { return (*this)(start, end, end); }

  // Pairs of the queries [start, end) of a document of `length` tokens.
  int64_t operator()(int64_t start, int64_t end, int64_t length) const {
    if (IsUnlimited()) return (end * (end + 1) - start * (start + 1)) / 2;
    return Before(end, length) - Before(start, length);
  }

  // Where the pairs of a query stop to grow with its position, and where they begin to fall.
  std::pair<int64_t, int64_t> Turns(int64_t length) const {
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
    return left == kNoLimit ? 0 : std::max<int64_t>(0, start - left);
  }
  int64_t LastKey(int64_t end, int64_t length) const {
    return right == kNoLimit ? length : std::min(length, end + right);
  }

 private:
  int64_t Before(int64_t end, int64_t length) const {
    const int64_t seen = right == kNoLimit ? end * length : UpTo(right, end, length);
    return left == kNoLimit ? seen : seen - UpTo(-left - 1, end, length);
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

}  // namespace cpd
