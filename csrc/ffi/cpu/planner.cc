// Python bindings of the planner: documents to pieces.
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/cpu/bindings.h"
#include "nanobind/ndarray.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"
#include "planner/move_queries.h"
#include "planner/placement.h"

namespace nb = nanobind;

namespace cpd {
namespace {

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

Mask MaskOf(const PairCount& pairs) { return Mask(pairs.left, pairs.right, pairs.chunk); }
Mask MaskOf(const PairSum& pairs) { return MaskOf(pairs.terms.front().pairs); }

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

// Plans without the interpreter.
template <typename Problem>
Pieces Plan(RankPieces (*plan)(Problem), const Problem& problem) {
  RankPieces ranks;
  {
    nb::gil_scoped_release release;
    ranks = plan(problem);
  }
  return RowsOf(ranks);
}

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<int64_t> ListOf(const Numbers& x) { return {x.data(), x.data() + x.size()}; }

// Requires numbers for each query of the documents that the problem has.
SharedTable TableOf(const std::vector<int64_t>& lengths, const Numbers& pairs_before,
                    const Numbers& first_key, const Numbers& last_key) {
  QueryTable table{{}, ListOf(pairs_before), ListOf(first_key), ListOf(last_key)};
  size_t num_queries = 0;
  for (int64_t length : lengths) {
    table.first_query.push_back(static_cast<int64_t>(num_queries));
    num_queries += static_cast<size_t>(length);
  }
  if (table.pairs_before.size() != num_queries + 1 || table.first_key.size() != num_queries ||
      table.last_key.size() != num_queries) {
    throw nb::value_error("set_table: it needs numbers for each query of `lengths`.");
  }
  return std::make_shared<const QueryTable>(std::move(table));
}

// The fields that both problems have; the headers of `csrc/planner` describe them.
template <typename Problem>
nb::class_<Problem> BindProblem(nb::module_& m, const char* name) {
  return nb::class_<Problem>(m, name)
      .def(nb::init<>())
      .def_rw("lengths", &Problem::lengths)
      .def_rw("num_ranks", &Problem::num_ranks)
      .def_rw("tolerance_ppm", &Problem::tolerance_ppm)
      .def_rw("speeds", &Problem::speeds)
      .def_rw("ranks_per_node", &Problem::ranks_per_node)
      .def_rw("block", &Problem::block)
      .def_prop_rw(
          "pairs", [](const Problem& x) { return MaskOf(x.pairs); },
          [](Problem& x, const Mask& mask) { x.pairs = PairsOf(mask); })
      .def(
          "set_table",
          [](Problem& x, const Numbers& pairs_before, const Numbers& first_key,
             const Numbers& last_key) {
            x.table = TableOf(x.lengths, pairs_before, first_key, last_key);
          },
          nb::arg("pairs_before"), nb::arg("first_key"), nb::arg("last_key"),
          "In place of `pairs`: numbers of each query of `lengths`, see `QueryTable`.");
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
  BindProblem<PlacementProblem>(m, "PlacementProblem")
      .def(
          "set_layers",
          [](PlacementProblem& x, const std::vector<std::tuple<Mask, int64_t>>& masks) {
            x.pairs.terms.clear();
            for (const auto& [mask, layers] : masks) {
              x.pairs.terms.push_back({PairsOf(mask), layers});
            }
          },
          nb::arg("masks"), "Several masks in place of `pairs`, and how many layers use each.")
      .def_rw("tokens_per_rank", &PlacementProblem::tokens_per_rank)
      .def_rw("max_received", &PlacementProblem::max_received);
  BindProblem<QueryProblem>(m, "QueryProblem")
      .def_rw("columns", &QueryProblem::columns)
      .def_rw("columns_per_rank", &QueryProblem::columns_per_rank)
      .def_rw("query_cost", &QueryProblem::query_cost)
      .def_rw("key_cost", &QueryProblem::key_cost)
      .def_rw("max_queries", &QueryProblem::max_queries)
      .def_rw("max_keys", &QueryProblem::max_keys)
      .def_rw("wanted_piece", &QueryProblem::wanted_piece);
  m.def(
      "place_documents",
      [](const PlacementProblem& problem) { return Plan(&PlaceDocuments, problem); },
      nb::arg("problem"), "Pieces of documents by rank: rows (rank, document, start, end).");
  m.def(
      "move_queries", [](const QueryProblem& problem) { return Plan(&MoveQueries, problem); },
      nb::arg("problem"), "The pieces that each rank computes, in the same form.");
}

}  // namespace cpd
