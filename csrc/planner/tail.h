// The tail of a document on a rank, and what stands beside it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "planner/closing_state.h"
#include "planner/placement.h"

namespace cpd {

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

}  // namespace cpd
