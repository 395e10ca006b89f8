// The kernels of attention, all threads of a block in turn on the host, against plain loops in
// double precision: documents, windows, random and empty ranges, more rows and keys than tiles.
// The smallest heads, and those whose gradients take two parts; others: test_attention_sizes.cc.
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "attention_on_host.h"
#include "check.h"
#include "native_test.h"

namespace cpd::kernels::test_attention_kernels {

// Where an array would begin if its first `num_elements` were ahead of these.
template <typename T>
T* Ahead(T* array, int64_t num_elements) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(array) - num_elements * sizeof(T));
}

// Rows and keys of one head, as the last ones of the last of three large batch rows. Only the
// blocks run that access them.
void ReachesTheEndOfLargeArrays(std::mt19937& rng) {
  constexpr int H = 64, kBefore = 1 << 25;  // of rows, and of keys
  constexpr int kBatch = 3;
  static_assert(int64_t{kBefore} * H > std::numeric_limits<int32_t>::max());
  static_assert(kBefore % kTile == 0, "the same tiles");
  const AttentionShape shape{70, 100, 1, 1, 1};
  const AttentionProblem<BF16, H, H> problem(rng, shape);
  const int num_rows = kBefore + shape.num_queries, num_keys = kBefore + shape.num_keys;
  Seen<int32_t> start(problem.start), end(problem.end);
  for (size_t i = 0; i < start.size(); ++i) {
    if (start[i] >= end[i]) continue;
    start[i] += kBefore;
    end[i] += kBefore;
  }
  const auto of_rows = [&](auto* array, int width) {
    return Ahead(array, (int64_t{kBatch} * num_rows - shape.num_queries) * width);
  };
  const auto of_keys = [&](auto* array, int width) {
    return Ahead(array, (int64_t{kBatch} * num_keys - shape.num_keys) * width);
  };
  const auto enlarge = [&](AttentionOperands* of) {
    of->q = of_rows(of->q, H);
    of->k = of_keys(of->k, H);
    of->v = of_keys(of->v, H);
    of->start = of_rows(start.data(), 1);
    of->end = of_rows(end.data(), 1);
    of->batch = kBatch;
    of->num_rows = num_rows;
    of->num_keys = num_keys;
  };
  const int first_of_rows = kBatch * NumTiles(num_rows) - NumTiles(shape.num_queries);
  const int first_of_keys = kBatch * NumTiles(num_keys) - NumTiles(shape.num_keys);
  const auto attend = [&](AttendCall call) {
    enlarge(&call);
    call.peak = of_rows(call.peak, 1);
    call.lse = of_rows(call.lse, 1);
    call.out.data = of_rows(static_cast<float*>(call.out.data), H);
    AttendOnHost<BF16, H, H>(call, false, first_of_rows);
  };
  const auto differentiate = [&](GradientsCall call) {
    enlarge(&call);
    call.dout = of_rows(call.dout, H);
    call.out.data = of_rows(static_cast<const float*>(call.out.data), H);
    call.lse = of_rows(call.lse, 1);
    call.dlse = of_rows(call.dlse, 1);
    call.dq.data = of_rows(static_cast<float*>(call.dq.data), H);
    call.dk.data = of_keys(static_cast<float*>(call.dk.data), H);
    call.dv.data = of_keys(static_cast<uint16_t*>(call.dv.data), H);
    std::vector<QueryTile> tiles(NumTiles(num_rows), QueryTile{kNone, 0, {}, 0, 0, {}});
    call.tiles = Ahead(tiles.data(), (kBatch - 1) * static_cast<int64_t>(tiles.size()));
    std::vector<RowNumbers> numbers(shape.num_queries);
    call.numbers = of_rows(numbers.data(), 1);
    DifferentiateOnHost<BF16, H, H>(call, false, first_of_rows, first_of_keys);
  };
  const auto small = RunWhole(
      problem, true, [](const AttendCall& call) { AttendOnHost<BF16, H, H>(call, false); },
      [](const GradientsCall& call) { DifferentiateOnHost<BF16, H, H>(call, false); });
  CHECK(RunWhole(problem, true, attend, differentiate) == small);
}

// A tile is visited if a row sees one of its keys, and only then.
void VisitsNoOtherTiles() {
  constexpr int kRows = 2 * kTile, kKeys = 12 * kTile;
  std::vector<int32_t> start(kRows, kKeys), end(kRows, 0);
  start[3] = 10, end[3] = kTile + 1;                   // tiles 0 and 1
  start[60] = 9 * kTile, end[60] = kKeys;              // tiles 9, 10 and 11
  start[70] = 5 * kTile - 1, end[70] = start[70] + 1;  // tile 4, in the second block
  std::vector<uint16_t> zeros(kKeys * 64);
  AttentionOperands of{};
  of.q = of.k = of.v = zeros.data();
  of.start = start.data();
  of.end = end.data();
  of.batch = of.num_heads = of.num_kv_heads = 1;
  of.num_rows = kRows;
  of.num_keys = kKeys;
  std::vector<int> tiles[2];
  RowRanges rows[2];
  for (int block = 0; block < 2; ++block) {
    auto stages = std::make_unique<KeyStages<64, 64, 2>>();
    AsyncCopies copies(true);
    rows[block].Copy(&copies, of, 0, block * kTile);
    rows[block].FindCommon(false);
    ForTilesOfKeys(of, TileOfHead{0, 0, block * kTile}, rows[block], stages.get(), &copies,
                   [&](int key, auto...) { tiles[block].push_back(key / kTile); });
  }
  CHECK((tiles[0] == std::vector<int>{0, 1, 9, 10, 11}));
  CHECK((tiles[1] == std::vector<int>{4}));
  std::vector<QueryTile> found(2);
  for (int block = 0; block < 2; ++block) WriteQueryTile(&found[block], rows[block]);
  CHECK(found[0].first == 10 && found[0].last == kKeys);
  CHECK(found[1].first == 5 * kTile - 1 && found[1].last == 5 * kTile);
  CHECK(found[0].used[0] == 1u << 3 && found[0].used[1] == 1u << (60 - 32));
  CHECK(found[1].used[0] == 1u << (70 - kTile) && found[1].used[1] == 0);
  GradientsCall call{};
  static_cast<AttentionOperands&>(call) = of;
  call.num_heads = 2;
  call.tiles = found.data();
  const auto queries = [&](int tile) {
    std::vector<int> heads_and_queries;
    const KeyRanges none{};
    QueryTiles all(call, 0, tile * kTile, none);
    for (auto one = all.Next(); one.first != kNone; one = all.Next()) {
      heads_and_queries.insert(heads_and_queries.end(), {one.head, one.first});
    }
    return heads_and_queries;
  };
  CHECK((queries(1) == std::vector<int>{0, 0, 1, 0}));
  // The keys of the first tile have holes.
  CHECK((queries(4) == std::vector<int>{0, 0, 1, 0, 0, 64, 1, 64}));
  CHECK((queries(11) == std::vector<int>{0, 0, 1, 0}));
  CHECK(rows[0].FirstKey(kTile) == kTile);
  CHECK(rows[0].FirstKey(4 * kTile) == 9 * kTile);
}

// What rows have in common, and which keys one of them sees.
void FindsCommonAndUsedKeys(std::mt19937& rng) {
  RowRanges rows{};
  for (int i = 0; i < kTile; ++i) {
    rows.start[i] = static_cast<int>(rng() % 40);
    rows.end[i] = 50 + static_cast<int>(rng() % 100);
  }
  rows.end[17] = 3;  // in the second warp
  rows.FindCommon(false);
  uint64_t used = 0;
  for (int key = 0; key < kTile; ++key) {
    for (int row = 0; row < kTile; ++row) used |= uint64_t{rows.Sees(row, 32 + key)} << key;
  }
  CHECK(rows.UsedKeys(32) == used);
  CHECK(!rows.of_block.Have(40, 41));
  for (int w = 0; w < kAttentionWarps; ++w) {
    for (int key = 0; key < 150; ++key) {
      bool is_common = true;
      for (int i = 0; i < kWarpRows; ++i) is_common &= rows.Sees(w * kWarpRows + i, key);
      CHECK(rows.of_warp[w].Have(key, key + 1) == is_common);
    }
  }
}

const Register kTests("test_attention_kernels", [](const Numbers& numbers) {
  const int seed = numbers.Get(0, static_cast<int>(std::random_device{}()));
  std::fprintf(stderr, "seed %d\n", seed);
  std::mt19937 rng(seed);
  VisitsNoOtherTiles();
  FindsCommonAndUsedKeys(rng);
  ReachesTheEndOfLargeArrays(rng);
  EqualsLoops<BF16, 64, 64>(rng, {136, 216, 1, 1, 1}, true);
  EqualsLoops<BF16, 64, 64>(rng, {70, 130, 2, 2, 1, true}, false);
  EqualsLoops<BF16, 64, 64>(rng, {150, 200, 1, 1, 1, false, true, true}, false);
  EqualsLoops<BF16, 192, 128>(rng, {40, 90}, true);
});

}  // namespace cpd::kernels::test_attention_kernels
