// The kernels of attention, all threads of a block in turn on the host, against plain loops in
// double precision: documents, windows, random and empty ranges, more rows and keys than tiles.
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/attend.h"
#include "kernels/attention_gradients.h"
#include "native_test.h"

namespace cpd::kernels::test_attention_kernels {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

float Wide(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

std::vector<uint16_t> Draw(std::mt19937& rng, size_t size) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(size);
  for (auto& bits : x) bits = static_cast<uint16_t>(PackBf16(normal(rng), 0));
  return x;
}

// The operands, and what plain loops compute. Keys [0, half) come in a first call, the others in a
// second one.
template <int H>
struct Problem {
  static constexpr int kMatrices = 2;
  int num_rows, num_keys;
  std::vector<uint16_t> q, k, v, dout;
  std::vector<int32_t> start, end;
  std::vector<double> out, lse, delta, dq, dk, dv;

  Problem(std::mt19937& rng, int num_rows, int num_keys) : num_rows(num_rows), num_keys(num_keys) {
    const size_t rows = kMatrices * num_rows, keys = kMatrices * num_keys;
    q = Draw(rng, rows * H);
    dout = Draw(rng, rows * H);
    k = Draw(rng, keys * H);
    v = Draw(rng, keys * H);
    const auto below = [&](int n) { return static_cast<int>(rng() % n); };
    for (int m = 0, document = 0; m < kMatrices; ++m, document = 0) {
      for (int i = 0; i < num_rows; ++i) {
        if (below(40) == 0) document = std::min(i, num_keys - 1);
        int from = document, to = std::min(i + 1, num_keys);
        if (i / 32 % 3 == 2) from = below(num_keys), to = std::min(num_keys, from + below(80));
        if (below(9) == 0 || to <= from) from = num_keys, to = 0;  // as cut_ranges() has it
        start.push_back(from);
        end.push_back(to);
      }
    }
    out.assign(rows * H, 0);
    dq = out;
    lse.assign(rows, -INFINITY);
    delta.assign(rows, 0);
    dk.assign(keys * H, 0);
    dv = dk;
    for (size_t row = 0; row < rows; ++row) Compute(row, row / num_rows * num_keys);
  }

  double Dot(const std::vector<uint16_t>& x, size_t i, const std::vector<uint16_t>& y, size_t j) {
    double sum = 0;
    for (int h = 0; h < H; ++h) sum += double{Wide(x[i * H + h])} * Wide(y[j * H + h]);
    return sum;
  }

  void Compute(size_t row, size_t keys) {
    std::vector<double> p;
    double total = 0;
    for (int j = start[row]; j < end[row]; ++j) {
      p.push_back(std::exp(Dot(q, row, k, keys + j) / std::sqrt(double{H})));
      total += p.back();
    }
    if (p.empty()) return;
    lse[row] = std::log(total);
    for (size_t j = 0; j < p.size(); ++j) {
      p[j] /= total;
      const size_t key = keys + start[row] + j;
      for (int h = 0; h < H; ++h) {
        out[row * H + h] += p[j] * Wide(v[key * H + h]);
        dv[key * H + h] += p[j] * Wide(dout[row * H + h]);
      }
    }
    for (int h = 0; h < H; ++h) delta[row] += out[row * H + h] * Wide(dout[row * H + h]);
    for (size_t j = 0; j < p.size(); ++j) {
      const size_t key = keys + start[row] + j;
      const double dx = p[j] * (Dot(dout, row, v, key) - delta[row]) / std::sqrt(double{H});
      for (int h = 0; h < H; ++h) {
        dq[row * H + h] += dx * Wide(k[key * H + h]);
        dk[key * H + h] += dx * Wide(q[row * H + h]);
      }
    }
  }

  // The operands of the keys [from, to) in arrays of their own.
  struct Part {
    std::vector<uint16_t> k, v;
    std::vector<int32_t> start, end;
  };
  Part Keys(int from, int to) const {
    Part part{{}, {}, start, end};
    for (int m = 0; m < kMatrices; ++m) {
      const auto take = [&](std::vector<uint16_t>* out, const std::vector<uint16_t>& x) {
        const auto matrix = x.begin() + int64_t{m} * num_keys * H;
        out->insert(out->end(), matrix + from * H, matrix + to * H);
      };
      take(&part.k, k);
      take(&part.v, v);
    }
    for (size_t i = 0; i < start.size(); ++i) {
      part.start[i] = std::clamp(start[i], from, to) - from;
      part.end[i] = std::clamp(end[i], from, to) - from;
    }
    return part;
  }

  AttentionOperands Operands(const Part& part, int keys) const {
    return {q.data(),  part.k.data(), part.v.data(), part.start.data(),      part.end.data(),
            kMatrices, num_rows,      keys,          1 / std::sqrt(float{H})};
  }
};

// Scratch memory begins with NaN; every block has it anew.
template <typename Scratch, typename Kernel>
void Launch(int num_blocks, bool is_early, Kernel kernel) {
  for (int index = 0; index < num_blocks; ++index) {
    auto scratch = std::make_unique<Scratch>();
    std::memset(static_cast<void*>(scratch.get()), 0xff, sizeof(Scratch));
    AsyncCopies copies(is_early);
    kernel(index, scratch.get(), &copies);
  }
}

template <typename T>
void CheckNear(const std::vector<T>& x, const std::vector<double>& wanted, double tolerance) {
  double largest = 0;
  for (const double y : wanted)
    largest = std::isfinite(y) ? std::fmax(largest, std::fabs(y)) : largest;
  CHECK(x.size() == wanted.size());
  for (size_t i = 0; i < x.size(); ++i) {
    CHECK(x[i] == wanted[i] || std::fabs(x[i] - wanted[i]) <= tolerance * largest);
  }
}

int Tiles(int rows) { return (rows + kTile - 1) / kTile; }

template <int H>
void EqualsLoops(std::mt19937& rng, int num_rows, int num_keys, int first_keys, bool is_early) {
  const Problem<H> problem(rng, num_rows, num_keys);
  const size_t rows = problem.start.size();
  std::vector<float> seen[3], softmax[3];
  std::vector<double> dq(rows * H), dk(problem.dk.size()), dv(problem.dv.size());
  std::vector<float> lse(problem.lse.begin(), problem.lse.end());
  for (float& x : lse) x = x == -INFINITY ? INFINITY : x;  // as cut_cotangents() has it
  const std::vector<float> delta(problem.delta.begin(), problem.delta.end());
  if (is_early) {  // as OnlineSoftmax.of_nothing() has it
    seen[0].assign(rows, std::numeric_limits<float>::lowest());
    seen[1].assign(rows, 0);
    seen[2].assign(rows * H, 0);
  }
  for (int part = 0; part < 2; ++part) {
    const int from = part * first_keys, keys = part ? num_keys - first_keys : first_keys;
    if (keys == 0) continue;
    const auto held = problem.Keys(from, from + keys);
    AttendCall attend{problem.Operands(held, keys), {}, {}, {}, {}, {}, {}};
    for (int i = 0; i < 3; ++i) softmax[i].assign(i == 2 ? rows * H : rows, kPoison);
    if (!seen[0].empty()) {
      attend.seen_peak = seen[0].data();
      attend.seen_total = seen[1].data();
      attend.seen_acc = seen[2].data();
    }
    attend.peak = softmax[0].data();
    attend.total = softmax[1].data();
    attend.acc = softmax[2].data();
    Launch<AttendScratch<H>>(2 * Tiles(num_rows), is_early,
                             [&](auto... arguments) { Attend<H>(attend, arguments...); });
    for (int i = 0; i < 3; ++i) seen[i] = softmax[i];

    std::vector<float> dq_here(rows * H, kPoison), dk_here(2 * keys * H, kPoison), dv_here(dk_here);
    std::vector<int32_t> reach(2 * 2 * 2 * Tiles(num_rows), -1);
    const GradientsCall gradients{problem.Operands(held, keys),
                                  problem.dout.data(),
                                  lse.data(),
                                  delta.data(),
                                  reach.data(),
                                  dq_here.data(),
                                  dk_here.data(),
                                  dv_here.data()};
    Launch<QueriesScratch<H>>(2 * Tiles(num_rows), is_early, [&](auto... arguments) {
      GradientsOfQueries<H>(gradients, arguments...);
    });
    Launch<KeysScratch<H>>(2 * Tiles(keys), is_early,
                           [&](auto... arguments) { GradientsOfKeys<H>(gradients, arguments...); });
    for (size_t i = 0; i < dq.size(); ++i) dq[i] += dq_here[i];
    for (int m = 0; m < 2; ++m) {
      for (int i = 0; i < keys * H; ++i) {
        dk[(m * num_keys + from) * H + i] = dk_here[m * keys * H + i];
        dv[(m * num_keys + from) * H + i] = dv_here[m * keys * H + i];
      }
    }
  }
  std::vector<double> out(rows * H), log_sums(rows);
  for (size_t i = 0; i < rows; ++i) {
    const float total = softmax[1][i];
    CHECK(std::isfinite(softmax[0][i]));
    log_sums[i] = softmax[0][i] + std::log(double{total});
    if (total == 0) log_sums[i] = -INFINITY;
    for (int h = 0; h < H; ++h) out[i * H + h] = softmax[2][i * H + h] / (total == 0 ? 1 : total);
  }
  CheckNear(log_sums, problem.lse, 1e-6);
  CheckNear(out, problem.out, 4e-3);  // probabilities are rounded to 8 bits
  CheckNear(dq, problem.dq, 6e-3);
  CheckNear(dk, problem.dk, 6e-3);
  CheckNear(dv, problem.dv, 6e-3);
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
    RowNumbers<kTile> rows;
    AsyncCopies copies(true);
    rows.Copy(&copies, of, 0, block * kTile, nullptr, nullptr);
    ForTilesOfKeys<64>(of, 0, rows, stages.get(), &copies,
                       [&](int key, auto...) { tiles[block].push_back(key / kTile); });
  }
  CHECK((tiles[0] == std::vector<int>{0, 1, 9, 10, 11}));
  CHECK((tiles[1] == std::vector<int>{4}));
  std::vector<int32_t> reach{10, kKeys, 9 * kTile, kKeys, 5 * kTile - 1, 5 * kTile, kNone, 0};
  GradientsCall call{of, {}, {}, {}, {}, {}, {}, {}};
  call.reach = reach.data();
  const auto steps = [&](int tile) {
    std::vector<int> found;
    StepsOfKeys all(call, 0, tile * kTile);
    for (int query = all.Next(); query != kNone; query = all.Next()) found.push_back(query);
    return found;
  };
  CHECK((steps(1) == std::vector<int>{0}));
  CHECK((steps(4) == std::vector<int>{64}));
  CHECK((steps(5).empty()));  // in the reach of the first step, but none of its rows sees it
  CHECK((steps(11) == std::vector<int>{32}));
}

const Register kTests("test_attention_kernels", [](const Numbers& numbers) {
  std::mt19937 rng(numbers.Get(0, static_cast<int>(std::random_device{}())));
  VisitsNoOtherTiles();
  EqualsLoops<64>(rng, 200, 168, 168, false);
  EqualsLoops<64>(rng, 136, 216, 72, true);
  EqualsLoops<128>(rng, 96, 150, 80, false);
});

}  // namespace cpd::kernels::test_attention_kernels
