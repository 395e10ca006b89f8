// The kernels of attention, all threads of a block in turn on the host, against plain loops in
// double precision: documents, windows, random and empty ranges, more rows and keys than tiles.
// `test_attention_kernels SEED ROUNDS` adds problems of random shapes, and prints errors.
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "attention_problem.h"
#include "check.h"
#include "kernels/attend.h"
#include "kernels/attention_gradients.h"
#include "native_test.h"

namespace cpd::kernels::test_attention_kernels {

// Runs the blocks from `first` on. Each has new scratch memory, which begins with NaN.
template <typename Scratch, typename Kernel>
void Launch(int64_t first, int64_t num_blocks, bool is_early, Kernel kernel) {
  for (int64_t index = first; index < num_blocks; ++index) {
    auto scratch = std::make_unique<Scratch>();
    std::memset(static_cast<void*>(scratch.get()), 0xff, sizeof(Scratch));
    AsyncCopies copies(is_early);
    kernel(index, scratch.get(), &copies);
  }
}

template <int H>
void AttendOnHost(const AttendCall& call, bool is_early, int64_t first = 0) {
  Launch<AttendScratch<H>>(first, call.num_matrices * NumTiles(call.num_rows), is_early,
                           [&](auto... arguments) { Attend<H>(call, arguments...); });
}

template <int H>
void DifferentiateOnHost(const GradientsCall& call, bool is_early, int64_t first_of_rows = 0,
                         int64_t first_of_keys = 0) {
  Launch<QueriesScratch<H>>(first_of_rows, call.num_matrices * NumTiles(call.num_rows), is_early,
                            [&](auto... arguments) { GradientsOfQueries<H>(call, arguments...); });
  Launch<KeysScratch<H>>(first_of_keys, call.num_matrices * NumTiles(call.num_keys), is_early,
                         [&](auto... arguments) { GradientsOfKeys<H>(call, arguments...); });
}

template <int H>
AttentionErrors EqualsLoops(std::mt19937& rng, const AttentionShape& shape, bool is_early) {
  const AttentionProblem<H> problem(rng, shape);
  const auto results = RunAttention(
      problem, is_early, [&](const AttendCall& call) { AttendOnHost<H>(call, is_early); },
      [&](const GradientsCall& call) { DifferentiateOnHost<H>(call, is_early); });
  const AttentionErrors errors = ErrorsOf(problem, results);
  CheckErrors(errors, 1e-6);
  return errors;
}

// Where an array would begin if its first `num_elements` were ahead of these.
template <typename T>
T* Ahead(T* array, int64_t num_elements) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(array) - num_elements * sizeof(T));
}

// Rows and keys of one matrix, as the last ones of the last of three large matrices. Only the
// blocks run that access them.
void ReachesTheEndOfLargeMatrices(std::mt19937& rng) {
  constexpr int H = 64, kBefore = 1 << 25;  // of rows, and of keys
  constexpr int64_t kMatrices = 3;
  static_assert(int64_t{kBefore} * H > std::numeric_limits<int32_t>::max());
  static_assert(kBefore % kTile == 0, "the same tiles");
  const AttentionProblem<H> problem(rng, {70, 1, 100, 100, 1});
  const int num_rows = kBefore + problem.num_rows, num_keys = kBefore + problem.shape.num_keys;
  Seen<int32_t> start(problem.start), end(problem.end);
  for (size_t i = 0; i < start.size(); ++i) {
    if (start[i] >= end[i]) continue;
    start[i] += kBefore;
    end[i] += kBefore;
  }
  const auto of_rows = [&](auto* array, int width) {
    return Ahead(array, (kMatrices * num_rows - problem.num_rows) * width);
  };
  const auto of_keys = [&](auto* array, int width) {
    return Ahead(array, (kMatrices * num_keys - problem.shape.num_keys) * width);
  };
  const auto enlarge = [&](AttentionOperands* of) {
    of->q = of_rows(of->q, H);
    of->k = of_keys(of->k, H);
    of->v = of_keys(of->v, H);
    of->start = of_rows(start.data(), 1);
    of->end = of_rows(end.data(), 1);
    of->num_matrices = kMatrices;
    of->num_rows = num_rows;
    of->num_keys = num_keys;
  };
  const int64_t first_of_rows = kMatrices * NumTiles(num_rows) - NumTiles(problem.num_rows);
  const int64_t first_of_keys = kMatrices * NumTiles(num_keys) - NumTiles(problem.shape.num_keys);
  const auto attend = [&](AttendCall call) {
    enlarge(&call);
    call.peak = of_rows(call.peak, 1);
    call.total = of_rows(call.total, 1);
    call.acc = of_rows(call.acc, H);
    AttendOnHost<H>(call, false, first_of_rows);
  };
  const auto differentiate = [&](GradientsCall call) {
    enlarge(&call);
    call.dout = of_rows(call.dout, H);
    call.lse = of_rows(call.lse, 1);
    call.delta = of_rows(call.delta, 1);
    call.dq = of_rows(call.dq, H);
    call.dk = of_keys(call.dk, H);
    call.dv = of_keys(call.dv, H);
    std::vector<int32_t> reach;  // of the last matrix
    for (int tile = 0; tile < NumTiles(num_rows); ++tile) {
      reach.insert(reach.end(), {kNone, 0});
    }
    call.reach = Ahead(reach.data(), (kMatrices - 1) * static_cast<int64_t>(reach.size()));
    DifferentiateOnHost<H>(call, false, first_of_rows, first_of_keys);
  };
  const auto small = RunAttention(
      problem, false, [](const AttendCall& call) { AttendOnHost<H>(call, false); },
      [](const GradientsCall& call) { DifferentiateOnHost<H>(call, false); });
  CHECK(RunAttention(problem, false, attend, differentiate) == small);
}

// A tile is visited if a row sees one of its keys, and only then.
void VisitsNoOtherTiles() {
  constexpr int kRows = 2 * kTile, kKeys = 12 * kTile;
  std::vector<int32_t> start(kRows, kKeys), end(kRows, 0);
  start[3] = 10, end[3] = kTile + 1;                   // tiles 0 and 1
  start[60] = 9 * kTile, end[60] = kKeys;              // tiles 9, 10 and 11
  start[70] = 5 * kTile - 1, end[70] = start[70] + 1;  // tile 4, in the second block
  std::vector<uint16_t> zeros(kKeys * 64);
  AttentionOperands of{
      zeros.data(), zeros.data(), zeros.data(), start.data(), end.data(), 1, kRows, kKeys, 1};
  std::vector<int> tiles[2];
  for (int block = 0; block < 2; ++block) {
    auto stages = std::make_unique<KeyStages<64>>();
    RowNumbers rows;
    AsyncCopies copies(true);
    rows.Copy(&copies, of, 0, block * kTile, nullptr, nullptr);
    ForTilesOfKeys<64>(of, 0, rows, stages.get(), &copies,
                       [&](int key, auto...) { tiles[block].push_back(key / kTile); });
  }
  CHECK((tiles[0] == std::vector<int>{0, 1, 9, 10, 11}));
  CHECK((tiles[1] == std::vector<int>{4}));
  std::vector<int32_t> reach{10, kKeys, 5 * kTile - 1, 5 * kTile};
  GradientsCall call{of, {}, {}, {}, {}, {}, {}, {}};
  call.reach = reach.data();
  const auto queries = [&](int tile) {
    std::vector<int> found;
    QueryTiles all(call, 0, tile * kTile);
    for (int query = all.Next(); query != kNone; query = all.Next()) found.push_back(query);
    return found;
  };
  CHECK((queries(1) == std::vector<int>{0}));
  CHECK((queries(4) == std::vector<int>{0, 64}));  // the reach of the first tile has holes
  CHECK((queries(11) == std::vector<int>{0}));
  RowNumbers rows;
  AsyncCopies copies(true);
  rows.Copy(&copies, of, 0, 0, nullptr, nullptr);
  CHECK(rows.See(kTile, 2 * kTile));
  CHECK(!rows.See(4 * kTile, 5 * kTile));
}

AttentionErrors OfRandomShape(std::mt19937& rng) {
  const AttentionShape shape = RandomAttentionShape(rng);
  const bool is_early = rng() % 2 == 0;
  return rng() % 2 == 0 ? EqualsLoops<64>(rng, shape, is_early)
                        : EqualsLoops<128>(rng, shape, is_early);
}

const Register kTests("test_attention_kernels", [](const Numbers& numbers) {
  const int seed = numbers.Get(0, static_cast<int>(std::random_device{}()));
  std::fprintf(stderr, "seed %d\n", seed);
  std::mt19937 rng(seed);
  VisitsNoOtherTiles();
  ReachesTheEndOfLargeMatrices(rng);
  EqualsLoops<64>(rng, {200, 1, 168, 168}, false);
  EqualsLoops<64>(rng, {136, 1, 216, 72}, true);
  EqualsLoops<128>(rng, {96, 1, 150, 80}, false);
  EqualsLoops<128>(rng, {37, 4, 100, 33, 1}, true);
  AttentionErrors worst{};
  for (int i = 0; i < numbers.Get(1, 1); ++i) {
    Enlarge(&worst, OfRandomShape(rng));
  }
  Print(stderr, worst);
});

}  // namespace cpd::kernels::test_attention_kernels
