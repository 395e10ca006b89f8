// Places the tokens of packed documents on ranks: equal tokens, nearly equal work, few moved keys.
#pragma once

#include <cstdint>
#include <vector>

namespace cpd {

// Query-key pairs of causal attention to at most `window` tokens of the document, the query's own
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
  int64_t tolerance_ppm = 10'000;  // allowed excess of the most loaded rank over the mean
};

// The pieces of each rank; missing tokens of a rank are padding.
using RankPieces = std::vector<std::vector<Piece>>;

// The mean work per rank, and the most that a rank should have; rounded down.
int64_t WorkLimit(const PlacementProblem& problem);

// The cost of an assignment. A rank receives a key of a document only once.
struct PlacementCost {
  int64_t excess = 0;         // excess of the most loaded rank over the limit, at least 0
  int64_t received_keys = 0;  // over all ranks

  bool operator<(const PlacementCost& other) const {
    return excess != other.excess ? excess < other.excess : received_keys < other.received_keys;
  }
};
PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks);

// The keys that a rank with these pieces receives. Sorts the pieces by document and start, and
// joins adjacent ones.
int64_t ReceivedKeys(const PairCount& pairs, std::vector<Piece>* pieces);

// The best of several constructions, after repair. Uses integers only and a fixed number of steps:
// equal problems give equal results on every machine.
RankPieces PlaceDocuments(const PlacementProblem& problem);

}  // namespace cpd
