// Placement of random documents under random constraints and masks: every token once, at most T per
// rank; pairs against brute force.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "native_test.h"
#include "planner/placement.h"
#include "random_documents.h"

namespace cpd::test_placement {

PairCount AnyMask(Random* random) {
  PairCount pairs;
  if (Draw(random, 4) == 0) {
    pairs.chunk = 1 + Draw(random, 12);
    return pairs;
  }
  if (Draw(random, 1) == 0) pairs.left = Draw(random, 12);
  const int64_t kind = Draw(random, 2);
  if (kind == 1) pairs.right = Draw(random, 12);
  if (kind == 2) pairs.right = PairCount::kNoLimit;
  return pairs;
}

void PairsAreThoseOfTheMask(int seed) {
  Random random(seed);
  const PairCount pairs = AnyMask(&random);
  const int64_t length = 1 + Draw(&random, 19), end = Draw(&random, length);
  const int64_t start = Draw(&random, end);
  int64_t count = 0;
  for (int64_t q = start; q < end; ++q) {
    for (int64_t k = 0; k < length; ++k) {
      const bool is_left = pairs.left == PairCount::kNoLimit || k >= q - pairs.left;
      const bool is_right = pairs.right == PairCount::kNoLimit || k <= q + pairs.right;
      const bool is_same = pairs.chunk == 0 || q / pairs.chunk == k / pairs.chunk;
      count += is_left && is_right && is_same;
      if (is_left && is_right && is_same) {
        Require(k >= pairs.FirstKey(start) && k < pairs.LastKey(end, length), "range", seed);
      }
    }
  }
  Require(pairs(start, end, length) == count, "pairs", seed);
}

void EveryTokenIsPlacedOnce(int seed) {
  Random random(seed);
  PlacementProblem problem;
  problem.num_ranks = 1 << Draw(&random, 3);
  problem.tokens_per_rank = 1 + Draw(&random, 300);
  problem.pairs = AnyMask(&random);
  int64_t left = problem.num_ranks * problem.tokens_per_rank;
  if (Draw(&random, 1) == 0) left -= left / 8;
  const int64_t longest = 1 + Draw(&random, left);
  while (left > 0) {
    const int64_t length = std::min(left, Draw(&random, Draw(&random, 3) == 0 ? longest : 40));
    problem.lengths.push_back(length);
    left -= length;
  }
  if (Draw(&random, 2) == 0) problem.max_received = Draw(&random, 4 * problem.tokens_per_rank);
  if (Draw(&random, 2) == 0) problem.block = 1 + Draw(&random, 16) % problem.tokens_per_rank;
  if (problem.num_ranks > 2 && Draw(&random, 1) == 0) problem.ranks_per_node = 2;
  if (Draw(&random, 2) == 0) {
    for (int32_t r = 0; r < problem.num_ranks; ++r) problem.speeds.push_back(1 + Draw(&random, 3));
  }
  if (Draw(&random, 1) == 0) problem.key_time = {Draw(&random, 9), Draw(&random, 99)};
  const RankPieces ranks = PlaceDocuments(problem);
  Require(static_cast<int32_t>(ranks.size()) == problem.num_ranks, "ranks", seed);
  std::vector<std::vector<int>> placed;
  for (int64_t length : problem.lengths) placed.emplace_back(length, 0);
  for (const std::vector<Piece>& pieces : ranks) {
    int64_t tokens = 0;
    for (const Piece& piece : pieces) {
      tokens += piece.num_tokens();
      Require(piece.num_tokens() > 0, "an empty piece", seed);
      for (int64_t p = piece.start; p < piece.end; ++p) ++placed[piece.document].at(p);
    }
    Require(tokens <= problem.tokens_per_rank, "too many tokens on a rank", seed);
  }
  for (const std::vector<int>& document : placed) {
    for (int times : document) Require(times == 1, "a token is not placed once", seed);
  }
}

const Register kTests("test_placement", [](const Numbers&) {
  for (int seed = 0; seed < 2000; ++seed) PairsAreThoseOfTheMask(seed);
  for (int seed = 0; seed < 150; ++seed) EveryTokenIsPlacedOnce(seed);
});

}  // namespace cpd::test_placement
