// Which rank keeps which tokens of packed documents: equal tokens, nearly equal work, few keys
// moved.
#pragma once

#include <cstdint>
#include <vector>

namespace cpd {

// Query-key pairs of attention to at most `window` earlier tokens of the document, oneself
// included.
struct PairCount {
  int64_t window = 0;  // 0: all of them

  // Of the queries [0, end) of a document.
  int64_t operator()(int64_t end) const {
    if (window == 0 || end <= window) return end * (end + 1) / 2;
    return window * (window + 1) / 2 + (end - window) * window;
  }
  int64_t operator()(int64_t start, int64_t end) const { return (*this)(end) - (*this)(start); }
};

// Tokens [start, end) of a document.
struct Piece {
  int64_t start = 0;
  int64_t end = 0;
  int32_t document = 0;

  int64_t num_tokens() const { return end - start; }
};

struct PlacementProblem {
  std::vector<int64_t> lengths;  // tokens of each document
  int32_t num_ranks = 1;
  int64_t tokens_per_rank =
      0;  // all ranks together hold at least the documents; the rest is padding
  PairCount pairs;
  int64_t tolerance_ppm = 10'000;  // how far the most loaded rank may be above the mean
};

// The pieces of each rank; what a rank lacks in tokens is padding.
using RankPieces = std::vector<std::vector<Piece>>;

// Work of all ranks over their number, and the most that a rank should do; rounded down.
int64_t WorkLimit(const PlacementProblem& problem);

// What an assignment amounts to. Keys of a document travel to a rank once.
struct PlacementCost {
  int64_t excess = 0;         // pairs of the most loaded rank beyond the limit, at least 0
  int64_t received_keys = 0;  // over all ranks

  bool operator<(const PlacementCost& other) const {
    return excess != other.excess ? excess < other.excess : received_keys < other.received_keys;
  }
};
PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks);

// Keys that a rank with these pieces receives. Sorts the pieces by document and start, and joins
// those that touch.
int64_t ReceivedKeys(const PairCount& pairs, std::vector<Piece>* pieces);

// The best of several constructions, after repair. Integers only, a fixed number of steps: equal
// problems give equal results on every machine.
RankPieces PlaceDocuments(const PlacementProblem& problem);

}  // namespace cpd
