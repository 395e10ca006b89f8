// What plans and placements have in common: documents, ranks, and the keys that queries see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "planner/pair_count.h"

namespace cpd {

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

// `Count` is a PairCount, or the PairSum of several layers.
template <typename Count>
struct PlannerProblem {
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;
  static constexpr int64_t kFewTokens = 512;  // in all, so that single ones decide about balance

  std::vector<int64_t> lengths;  // tokens of each document
  int32_t num_ranks = 1;
  Count pairs;
  SharedTable table;               // in place of `pairs`
  int64_t tolerance_ppm = 10'000;  // allowed excess of a rank over its share of the work
  std::vector<int64_t> speeds;  // relative speed of each rank, to which its share is proportional
  int32_t ranks_per_node = 1;   // consecutive ranks; all ranks, or 1, for no nodes
  int64_t block = 1;            // documents are cut at multiples of this, if possible

  int64_t Work(const Piece& piece) const {
    const int32_t document = piece.document;
    return table ? table->Pairs(document, piece.start, piece.end)
                 : pairs(piece.start, piece.end, lengths[document]);
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
  bool HasNodes() const { return ranks_per_node > 1 && ranks_per_node < num_ranks; }
};

}  // namespace cpd
