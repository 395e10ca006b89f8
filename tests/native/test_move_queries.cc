// Plans that move queries of random documents under random constraints: every query once, the same
// plan again.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "native_test.h"
#include "planner/problem.h"
#include "random_documents.h"

namespace cpd::test_move_queries {

// Any keys of each query.
SharedTable AnyTable(const std::vector<int64_t>& lengths, Random* random) {
  QueryTable table;
  table.pairs_before.push_back(0);
  for (int64_t length : lengths) {
    const size_t first = table.first_key.size();
    table.first_query.push_back(static_cast<int64_t>(first));
    for (int64_t q = 0; q < length; ++q) {
      const int64_t start = Draw(random, length), end = Draw(random, length);
      table.first_key.push_back(start < end ? start : length);
      table.last_key.push_back(start < end ? end : 0);
      table.pairs_before.push_back(table.pairs_before.back() + std::max<int64_t>(0, end - start));
    }
    for (size_t q = table.first_key.size(); q-- > first + 1;) {
      table.first_key[q - 1] = std::min(table.first_key[q - 1], table.first_key[q]);
    }
    for (size_t q = first + 1; q < table.last_key.size(); ++q) {
      table.last_key[q] = std::max(table.last_key[q - 1], table.last_key[q]);
    }
  }
  return std::make_shared<const QueryTable>(std::move(table));
}

QueryProblem AnyProblem(Random* random) {
  QueryProblem problem;
  problem.num_ranks = 1 << Draw(random, 3);
  problem.columns_per_rank = 1 + Draw(random, 200);
  const int64_t columns = problem.num_ranks * problem.columns_per_rank;
  for (int64_t row = 0; row <= Draw(random, 1); ++row) {
    const int64_t longest = 1 + Draw(random, columns);
    for (int64_t column = 0; column < columns;) {
      const int64_t most = Draw(random, 3) == 0 ? longest : 40;
      const int64_t length = std::min(columns - column, 1 + Draw(random, most));
      if (Draw(random, 9) > 0) {
        problem.lengths.push_back(length);
        problem.columns.push_back(column);
      }
      column += length;
    }
  }
  const int64_t kind = Draw(random, 3);
  PairCount pairs;
  if (kind == 0) pairs.left = Draw(random, 60);
  if (kind == 1) pairs.chunk = 1 + Draw(random, 60);
  if (Draw(random, 2) == 0) {  // later keys too
    pairs.right = kind == 0 ? Draw(random, 60) : PairCount::kNoLimit;
  }
  problem.pairs = pairs;
  if (Draw(random, 3) == 0) {
    problem.key_time = {Draw(random, 9), Draw(random, 99)};
    problem.query_time = {Draw(random, 9), Draw(random, 99)};
  }
  if (Draw(random, 3) == 0) problem.table = AnyTable(problem.lengths, random);
  problem.query_cost = 1 + Draw(random, 8);
  problem.key_cost = 1 + Draw(random, 8);
  if (Draw(random, 2) == 0) problem.max_queries = Draw(random, 2 * problem.columns_per_rank);
  if (Draw(random, 2) == 0) problem.max_keys = Draw(random, 4 * problem.columns_per_rank);
  if (Draw(random, 2) == 0) problem.block = 1 + Draw(random, 16);
  problem.wanted_piece = 1 + Draw(random, 16);
  if (problem.num_ranks > 2 && Draw(random, 1) == 0) problem.ranks_per_node = 2;
  if (Draw(random, 2) == 0) {
    for (int32_t r = 0; r < problem.num_ranks; ++r) problem.speeds.push_back(1 + Draw(random, 3));
  }
  return problem;
}

void EveryQueryIsComputedOnce(int seed) {
  Random random(seed);
  const QueryProblem problem = AnyProblem(&random);
  const RankPieces ranks = MoveQueries(problem), again = MoveQueries(problem);
  Require(static_cast<int32_t>(ranks.size()) == problem.num_ranks, "ranks", seed);
  std::vector<std::vector<int32_t>> computed;
  for (int64_t length : problem.lengths) computed.emplace_back(length, -1);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Require(ranks[rank].size() == again[rank].size(), "differs", seed);
    for (size_t i = 0; i < ranks[rank].size(); ++i) {
      const Piece& piece = ranks[rank][i];
      Require(piece.document == again[rank][i].document && piece.start == again[rank][i].start &&
                  piece.end == again[rank][i].end,
              "differs", seed);
      for (int64_t q = piece.start; q < piece.end; ++q) {
        Require(computed[piece.document][q] < 0, "twice", seed);
        computed[piece.document][q] = static_cast<int32_t>(rank);
      }
    }
  }
  for (const std::vector<int32_t>& document : computed) {
    for (int32_t rank : document) Require(rank >= 0, "missing", seed);
  }
}

const Register kTests("test_move_queries", [](const Numbers& numbers) {
  for (int seed = 0; seed < numbers.Get(0, 12); ++seed) EveryQueryIsComputedOnce(seed);
});

}  // namespace cpd::test_move_queries
