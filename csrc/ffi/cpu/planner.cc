// Python bindings of the planner: documents to pieces.
#include "ffi/cpu/planner.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "nanobind/ndarray.h"
#include "planner/placement.h"

namespace nb = nanobind;

namespace cpd {
namespace {

using Lengths = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pieces = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;

// Rows (rank, document, start, end), by rank, document and start.
Pieces PlaceDocumentsOf(const Lengths& lengths, int32_t num_ranks, int64_t tokens_per_rank,
                        int64_t window, int64_t tolerance_ppm) {
  PlacementProblem problem;
  problem.lengths.assign(lengths.data(), lengths.data() + lengths.shape(0));
  problem.num_ranks = num_ranks;
  problem.tokens_per_rank = tokens_per_rank;
  problem.pairs.window = window;
  problem.tolerance_ppm = tolerance_ppm;
  auto rows = std::make_unique<std::vector<int64_t>>();
  {
    nb::gil_scoped_release release;
    const RankPieces ranks = PlaceDocuments(problem);
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (const Piece& piece : ranks[rank]) {
        rows->insert(rows->end(),
                     {static_cast<int64_t>(rank), piece.document, piece.start, piece.end});
      }
    }
  }
  std::vector<int64_t>* data = rows.release();
  const nb::capsule owner(data,
                          [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Pieces(data->data(), {data->size() / 4, 4}, owner);
}

}  // namespace

void BindPlanner(nb::module_& m) {
  m.def("place_documents", &PlaceDocumentsOf, nb::arg("lengths"), nb::kw_only(),
        nb::arg("num_ranks"), nb::arg("tokens_per_rank"), nb::arg("window"),
        nb::arg("tolerance_ppm"),
        "Pieces of documents by rank: rows (rank, document, start, end).");
}

}  // namespace cpd
