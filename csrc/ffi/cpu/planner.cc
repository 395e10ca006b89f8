// Python bindings of the planner: documents to pieces.
#include "ffi/cpu/planner.h"

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "nanobind/ndarray.h"
#include "nanobind/stl/tuple.h"
#include "planner/move_queries.h"
#include "planner/placement.h"

namespace nb = nanobind;

namespace cpd {
namespace {

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pieces = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;
using Mask = std::tuple<int64_t, int64_t, int64_t>;  // left, right and chunk; negative: no limit

PairCount PairsOf(const Mask& mask) {
  const auto [left, right, chunk] = mask;
  PairCount pairs;
  pairs.left = left < 0 ? PairCount::kNoLimit : left;
  pairs.right = right < 0 ? PairCount::kNoLimit : right;
  pairs.chunk = chunk;
  return pairs;
}

// Rows (rank, document, start, end), by rank, document and start.
Pieces RowsOf(const RankPieces& ranks) {
  auto rows = std::make_unique<std::vector<int64_t>>();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const Piece& piece : ranks[rank]) {
      rows->insert(rows->end(),
                   {static_cast<int64_t>(rank), piece.document, piece.start, piece.end});
    }
  }
  std::vector<int64_t>* data = rows.release();
  const nb::capsule owner(data,
                          [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Pieces(data->data(), {data->size() / 4, 4}, owner);
}

std::vector<int64_t> VectorOf(const Numbers& numbers) {
  return {numbers.data(), numbers.data() + numbers.shape(0)};
}

// A negative limit is none.
Pieces PlaceDocumentsOf(const Numbers& lengths, const Numbers& speeds, int32_t num_ranks,
                        int64_t tokens_per_rank, int32_t ranks_per_node, const Mask& pairs,
                        int64_t tolerance_ppm, int64_t max_received, int64_t block) {
  PlacementProblem problem;
  problem.lengths = VectorOf(lengths);
  problem.speeds = VectorOf(speeds);
  problem.num_ranks = num_ranks;
  problem.tokens_per_rank = tokens_per_rank;
  problem.ranks_per_node = ranks_per_node;
  problem.pairs = PairsOf(pairs);
  problem.tolerance_ppm = tolerance_ppm;
  if (max_received >= 0) problem.max_received = max_received;
  problem.block = block;
  RankPieces ranks;
  {
    nb::gil_scoped_release release;
    ranks = PlaceDocuments(problem);
  }
  return RowsOf(ranks);
}

// A negative limit is none.
Pieces MoveQueriesOf(const Numbers& lengths, const Numbers& columns, const Numbers& speeds,
                     int32_t num_ranks, int64_t columns_per_rank, int32_t ranks_per_node,
                     const Mask& pairs, int64_t tolerance_ppm, int64_t query_cost, int64_t key_cost,
                     int64_t max_queries, int64_t max_keys, int64_t block, int64_t wanted_piece) {
  QueryProblem problem;
  problem.lengths = VectorOf(lengths);
  problem.columns = VectorOf(columns);
  problem.speeds = VectorOf(speeds);
  problem.num_ranks = num_ranks;
  problem.columns_per_rank = columns_per_rank;
  problem.ranks_per_node = ranks_per_node;
  problem.pairs = PairsOf(pairs);
  problem.tolerance_ppm = tolerance_ppm;
  problem.query_cost = query_cost;
  problem.key_cost = key_cost;
  if (max_queries >= 0) problem.max_queries = max_queries;
  if (max_keys >= 0) problem.max_keys = max_keys;
  problem.block = block;
  problem.wanted_piece = wanted_piece;
  RankPieces ranks;
  {
    nb::gil_scoped_release release;
    ranks = MoveQueries(problem);
  }
  return RowsOf(ranks);
}

}  // namespace

void BindPlanner(nb::module_& m) {
  m.def(
      "count_pairs",
      [](const Mask& pairs, int64_t start, int64_t end, int64_t length) {
        return PairsOf(pairs)(start, end, length);
      },
      nb::arg("pairs"), nb::arg("start"), nb::arg("end"), nb::arg("length"),
      "Pairs of the queries [start, end) of a document, as the planner counts them.");
  m.def("place_documents", &PlaceDocumentsOf, nb::arg("lengths"), nb::kw_only(), nb::arg("speeds"),
        nb::arg("num_ranks"), nb::arg("tokens_per_rank"), nb::arg("ranks_per_node"),
        nb::arg("pairs"), nb::arg("tolerance_ppm"), nb::arg("max_received"),
        nb::arg("block"), "Pieces of documents by rank: rows (rank, document, start, end).");
  m.def("move_queries", &MoveQueriesOf, nb::arg("lengths"), nb::arg("columns"), nb::kw_only(),
        nb::arg("speeds"), nb::arg("num_ranks"), nb::arg("columns_per_rank"),
        nb::arg("ranks_per_node"), nb::arg("pairs"), nb::arg("tolerance_ppm"),
        nb::arg("query_cost"), nb::arg("key_cost"), nb::arg("max_queries"), nb::arg("max_keys"),
        nb::arg("block"), nb::arg("wanted_piece"),
        "The pieces that each rank computes, in the same form.");
}

}  // namespace cpd
