// Attention to one range of keys per query: random operands, the results of plain loops in double
// precision, and those of the kernels on a GPU or on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/attend.h"
#include "kernels/attention_gradients.h"
#include "seen.h"

namespace cpd::kernels {

struct AttentionShape {
  int num_queries, num_keys;
  int group = 1;  // query heads of a KV head
  int num_kv_heads = 1;
  int batch = 2;
  bool has_sink = false, has_soft_cap = false;
  bool has_query_ranges = false;  // of keys

  int NumHeads() const { return group * num_kv_heads; }
};

// Sizes of any kind and at the ends of tiles, in groups of up to 8.
inline AttentionShape RandomAttentionShape(std::mt19937& rng) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(rng() % static_cast<uint32_t>(high - low + 1));
  };
  const auto size = [&](int most) {
    const bool is_at_end = most > kTile && draw(0, 2) == 0;
    return is_at_end ? draw(1, most / kTile) * kTile + draw(-1, 1) : draw(1, most);
  };
  const int group = 1 << draw(0, 3);
  AttentionShape shape{size(240 / group + 40), size(256), group, 1 + (group < 8 ? draw(0, 1) : 0),
                       draw(1, 2)};
  shape.has_sink = draw(0, 1) == 1;
  shape.has_soft_cap = draw(0, 2) == 0;
  shape.has_query_ranges = draw(0, 2) == 0;
  return shape;
}

template <typename T>
bool SameBits(const Seen<T>& x, const Seen<T>& y) {
  const size_t bytes = sizeof(T) * x.size();
  return x.size() == y.size() && (bytes == 0 || std::memcmp(x.data(), y.data(), bytes) == 0);
}

// An array that a kernel writes, as floats or as elements; it begins with NaN.
template <typename Element>
struct PoisonedArray {
  bool is_wide;
  Seen<float> wide;
  Seen<uint16_t> narrow;

  PoisonedArray(size_t size, bool is_wide) : is_wide(is_wide) {
    if (is_wide) wide.assign(size, std::numeric_limits<float>::quiet_NaN());
    if (!is_wide) narrow.assign(size, 0xffff);
  }
  MutableFloats Data() {
    return {is_wide ? static_cast<void*>(wide.data()) : narrow.data(), is_wide};
  }
  size_t size() const { return is_wide ? wide.size() : narrow.size(); }
  double operator[](size_t i) const { return is_wide ? wide[i] : float{Element{narrow[i]}}; }
  bool operator==(const PoisonedArray& other) const {
    return is_wide == other.is_wide && SameBits(wide, other.wide) && SameBits(narrow, other.narrow);
  }
};

// The operands, and what plain loops compute. Rows that nothing uses are NaN.
template <typename Element, int H, int Hv>
struct AttentionProblem {
  static constexpr float kSoftCap = 1.5f;
  AttentionShape shape;
  Seen<uint16_t> q, k, v, dout;
  Seen<int32_t> start, end, index;
  Seen<int32_t> first_query, end_query;  // of each key, indices of queries
  Seen<float> sink, dlse;                // of each head; of each row
  std::vector<double> out, lse, peak, delta, dq, dk, dv;

  AttentionProblem(std::mt19937& rng, const AttentionShape& shape) : shape(shape) {
    const size_t queries = size_t(shape.batch) * shape.num_queries * shape.NumHeads();
    const size_t keys = size_t(shape.batch) * shape.num_keys * shape.num_kv_heads;
    Draw(rng, queries * H, &q);
    Draw(rng, queries * Hv, &dout);
    Draw(rng, keys * H, &k);
    Draw(rng, keys * Hv, &v);
    std::normal_distribution<float> normal;
    for (int i = 0; i < shape.batch * shape.NumHeads(); ++i) sink.push_back(normal(rng));
    for (size_t i = 0; i < queries; ++i) dlse.push_back(normal(rng));
    for (int b = 0; b < shape.batch; ++b) {
      DrawRanges(rng);
      DrawQueries(rng);
    }
    out.assign(queries * Hv, 0);
    dq.assign(queries * H, 0);
    lse.assign(queries, -INFINITY);
    peak = lse;
    delta.assign(queries, 0);
    dk.assign(keys * H, 0);
    dv.assign(keys * Hv, 0);
    for (int b = 0; b < shape.batch; ++b) {
      for (int t = 0; t < shape.num_queries; ++t) {
        for (int n = 0; n < shape.NumHeads(); ++n) Compute(b, t, n);
      }
    }
    SpoilUnused();
  }

  size_t Query(int b, int t, int n) const {
    return (size_t(b) * shape.num_queries + t) * shape.NumHeads() + n;
  }
  size_t Key(int b, int s, int n) const {
    return (size_t(b) * shape.num_keys + s) * shape.num_kv_heads + n / shape.group;
  }
  // Of numbers of rows.
  size_t Row(int b, int t, int n) const {
    return (size_t(b) * shape.NumHeads() + n) * shape.num_queries + t;
  }

  // The operands of the keys [from, to) in arrays of their own.
  struct Part {
    int num_keys;
    Seen<uint16_t> k, v;
    Seen<int32_t> start, end, first_query, end_query;
  };
  Part Keys(int from, int to) const {
    Part part{to - from, {}, {}, start, end, {}, {}};
    for (int b = 0; b < shape.batch; ++b) {
      const auto take = [&](Seen<uint16_t>* out, const Seen<uint16_t>& x, int size) {
        const auto row = x.begin() + int64_t{b} * shape.num_keys * shape.num_kv_heads * size;
        const int64_t width = int64_t{shape.num_kv_heads} * size;
        out->insert(out->end(), row + from * width, row + to * width);
      };
      take(&part.k, k, H);
      take(&part.v, v, Hv);
      const int64_t row = int64_t{b} * shape.num_keys;
      const auto take_range = [&](Seen<int32_t>* out, const Seen<int32_t>& x) {
        out->insert(out->end(), x.begin() + row + from, x.begin() + row + to);
      };
      take_range(&part.first_query, first_query);
      take_range(&part.end_query, end_query);
    }
    for (size_t i = 0; i < start.size(); ++i) {
      part.start[i] = std::clamp(start[i], from, to) - from;
      part.end[i] = std::clamp(end[i], from, to) - from;
    }
    return part;
  }

  AttentionOperands Operands(const Part& part) const {
    AttentionOperands of{};
    of.q = q.data();
    of.k = part.k.data();
    of.v = part.v.data();
    of.start = part.start.data();
    of.end = part.end.data();
    of.batch = shape.batch;
    of.num_rows = shape.num_queries;
    of.num_keys = part.num_keys;
    of.num_heads = shape.NumHeads();
    of.num_kv_heads = shape.num_kv_heads;
    of.scale = 1 / std::sqrt(float{H});
    of.soft_cap = shape.has_soft_cap ? kSoftCap : 0;
    if (!shape.has_query_ranges) return of;
    of.index = index.data();
    of.first_query = part.first_query.data();
    of.end_query = part.end_query.data();
    return of;
  }

 private:
  // Of the length of a query's document, on either side of a key; a few keys are hidden.
  void DrawQueries(std::mt19937& rng) {
    const auto below = [&](int n) { return static_cast<int>(rng() % n); };
    for (int i = 0; i < shape.num_queries; ++i) index.push_back(7 + 2 * i);
    for (int j = 0; j < shape.num_keys; ++j) {
      const int first = 7 + 2 * j - below(60), length = below(11) == 0 ? 0 : below(200);
      first_query.push_back(first);
      end_query.push_back(first + length);
    }
  }

  bool IsVisible(int b, int t, int j) const {
    const size_t row = size_t(b) * shape.num_queries + t, key = size_t(b) * shape.num_keys + j;
    if (j < start[row] || j >= end[row]) return false;
    return !shape.has_query_ranges ||
           (index[row] >= first_query[key] && index[row] < end_query[key]);
  }

  static double At(const Seen<uint16_t>& x, size_t i) { return float{Element{x[i]}}; }

  static void Draw(std::mt19937& rng, size_t size, Seen<uint16_t>* x) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < size; ++i) x->push_back(Element::Round(normal(rng)).bits);
  }

  // Documents, windows, random and empty ranges.
  void DrawRanges(std::mt19937& rng) {
    const int num_keys = shape.num_keys;
    const auto below = [&](int n) { return static_cast<int>(rng() % n); };
    for (int i = 0, document = 0; i < shape.num_queries; ++i) {
      if (below(40) == 0) document = std::min(i, num_keys - 1);
      int first = document, last = std::min(i + 1, num_keys);
      if (i / 32 % 3 == 2) first = below(num_keys), last = std::min(num_keys, first + below(80));
      if (below(9) == 0) last = below(first + 1);  // empty, of any numbers
      start.push_back(first);
      end.push_back(last);
    }
  }

  static double Dot(const Seen<uint16_t>& x, size_t i, const Seen<uint16_t>& y, size_t j,
                    int size) {
    double sum = 0;
    for (int h = 0; h < size; ++h) sum += At(x, i * size + h) * At(y, j * size + h);
    return sum;
  }

  void Compute(int b, int t, int n) {
    const size_t query = Query(b, t, n), row = Row(b, t, n);
    const double scale = 1 / std::sqrt(double{H});
    std::vector<double> p, slope;
    std::vector<size_t> keys;
    double total = 0;
    for (int j = 0; j < shape.num_keys; ++j) {
      if (!IsVisible(b, t, j)) continue;
      keys.push_back(Key(b, j, n));
      double x = scale * Dot(q, query, k, keys.back(), H), ratio = 0;
      if (shape.has_soft_cap) ratio = std::tanh(x / kSoftCap), x = kSoftCap * ratio;
      slope.push_back(1 - ratio * ratio);
      peak[row] = std::max(peak[row], x);
      p.push_back(std::exp(x));
      total += p.back();
    }
    if (p.empty()) return;
    if (shape.has_sink) total += std::exp(double{sink[b * shape.NumHeads() + n]});
    lse[row] = std::log(total);
    for (size_t j = 0; j < p.size(); ++j) {
      p[j] /= total;
      const size_t key = keys[j];
      for (int h = 0; h < Hv; ++h) {
        out[query * Hv + h] += p[j] * At(v, key * Hv + h);
        dv[key * Hv + h] += p[j] * At(dout, query * Hv + h);
      }
    }
    for (int h = 0; h < Hv; ++h) delta[row] += out[query * Hv + h] * At(dout, query * Hv + h);
    delta[row] -= dlse[row];
    for (size_t j = 0; j < p.size(); ++j) {
      const size_t key = keys[j];
      const double dp = Dot(dout, query, v, key, Hv) - delta[row],
                   dx = p[j] * dp * slope[j] * scale;
      for (int h = 0; h < H; ++h) {
        dq[query * H + h] += dx * At(k, key * H + h);
        dk[key * H + h] += dx * At(q, query * H + h);
      }
    }
  }

  void SpoilUnused() {
    constexpr uint16_t kNaN = 0x7fff;
    const auto spoil = [&](Seen<uint16_t>* x, size_t row, int heads, int size) {
      std::fill_n(x->begin() + row * heads * size, heads * size, kNaN);
    };
    for (int b = 0; b < shape.batch; ++b) {
      std::vector<bool> used(shape.num_keys);
      for (int t = 0; t < shape.num_queries; ++t) {
        const size_t row = size_t(b) * shape.num_queries + t;
        for (int j = start[row]; j < end[row]; ++j) {
          const size_t key = size_t(b) * shape.num_keys + j;
          if (!shape.has_query_ranges || first_query[key] < end_query[key]) used[j] = true;
        }
        if (start[row] < end[row]) continue;
        spoil(&q, row, shape.NumHeads(), H);
        spoil(&dout, row, shape.NumHeads(), Hv);
      }
      for (int s = 0; s < shape.num_keys; ++s) {
        if (used[s]) continue;
        spoil(&k, size_t(b) * shape.num_keys + s, shape.num_kv_heads, H);
        spoil(&v, size_t(b) * shape.num_keys + s, shape.num_kv_heads, Hv);
      }
    }
  }
};

// What the kernels leave: the softmax of all keys, and the gradients.
template <typename Element>
struct AttentionResults {
  PoisonedArray<Element> out;
  Seen<float> lse, peak;
  PoisonedArray<Element> dq, dk, dv;

  bool operator==(const AttentionResults& other) const {
    return out == other.out && SameBits(lse, other.lse) && SameBits(peak, other.peak) &&
           dq == other.dq && dk == other.dk && dv == other.dv;
  }
};

// Scratch memory of gradients.
template <typename Problem>
struct GradientsScratch {
  Seen<QueryTile> tiles;
  Seen<RowNumbers> numbers;

  explicit GradientsScratch(const Problem& problem)
      : tiles(problem.shape.batch * NumTiles(problem.shape.num_queries)),
        numbers(problem.lse.size(), {NAN, NAN}) {
    std::memset(static_cast<void*>(tiles.data()), 0x7f, tiles.size() * sizeof(QueryTile));
  }
};

// Runs `attend(AttendCall)` and `differentiate(GradientsCall)` once on all keys. Results are floats
// or, if they are not wide, rounded.
template <typename Element, int H, int Hv, typename Attend, typename Differentiate>
AttentionResults<Element> RunWhole(const AttentionProblem<Element, H, Hv>& problem, bool is_wide,
                                   Attend attend, Differentiate differentiate) {
  constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  const auto all = problem.Keys(0, problem.shape.num_keys);
  const Seen<float> poison(problem.lse.size(), kPoison);
  AttentionResults<Element> results{{problem.out.size(), is_wide},
                                    poison,
                                    poison,
                                    {problem.dq.size(), is_wide},
                                    {problem.dk.size(), is_wide},
                                    {problem.dv.size(), !is_wide}};
  AttendCall call{};
  static_cast<AttentionOperands&>(call) = problem.Operands(all);
  call.out = results.out.Data();
  call.lse = results.lse.data();
  call.peak = results.peak.data();
  call.sink = problem.shape.has_sink ? problem.sink.data() : nullptr;
  attend(call);

  GradientsScratch<AttentionProblem<Element, H, Hv>> scratch(problem);
  GradientsCall back{};
  static_cast<AttentionOperands&>(back) = problem.Operands(all);
  back.dout = problem.dout.data();
  back.lse = results.lse.data();
  back.out = {call.out.data, call.out.is_wide};
  back.dlse = problem.dlse.data();
  back.tiles = scratch.tiles.data();
  back.numbers = scratch.numbers.data();
  back.dq = results.dq.Data();
  back.dk = results.dk.Data();
  back.dv = results.dv.Data();
  differentiate(back);
  return results;
}

// Likewise on two sets of keys, of which the first has `first_keys`. The softmax begins with no
// argument, or with that of no key. Results are floats; the problem has no sink.
template <typename Element, int H, int Hv, typename Attend, typename Differentiate>
AttentionResults<Element> RunParts(const AttentionProblem<Element, H, Hv>& problem, int first_keys,
                                   bool begins_with_nothing, Attend attend,
                                   Differentiate differentiate) {
  constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  const AttentionShape& shape = problem.shape;
  const size_t rows = problem.lse.size();
  const Seen<float> poison(rows, kPoison);
  AttentionResults<Element> results{{problem.out.size(), true},
                                    poison,
                                    poison,
                                    {problem.dq.size(), true},
                                    {problem.dk.size(), true},
                                    {problem.dv.size(), true}};
  Seen<float> softmax[3]{poison, poison, Seen<float>(rows * Hv, kPoison)};
  bool has_seen = begins_with_nothing;
  Seen<float> lse(problem.lse.begin(), problem.lse.end());
  const Seen<float> delta(problem.delta.begin(), problem.delta.end());
  if (begins_with_nothing) {  // as OnlineSoftmax.of_nothing() has it
    softmax[0].assign(rows, std::numeric_limits<float>::lowest());
    softmax[1].assign(rows, 0);
    softmax[2].assign(rows * Hv, 0);
  }
  for (const bool is_first : {true, false}) {
    const int from = is_first ? 0 : first_keys, to = is_first ? first_keys : shape.num_keys;
    if (from == to) continue;
    const auto held = problem.Keys(from, to);
    AttendCall call{};
    static_cast<AttentionOperands&>(call) = problem.Operands(held);
    if (has_seen) {  // in place
      call.seen_peak = softmax[0].data();
      call.seen_total = softmax[1].data();
      call.seen_acc = softmax[2].data();
    }
    call.peak = softmax[0].data();
    call.total = softmax[1].data();
    call.acc = softmax[2].data();
    attend(call);
    has_seen = true;

    PoisonedArray<Element> dk(held.k.size(), true), dv(held.v.size(), true);
    GradientsScratch<AttentionProblem<Element, H, Hv>> scratch(problem);
    GradientsCall back{};
    static_cast<AttentionOperands&>(back) = problem.Operands(held);
    back.dout = problem.dout.data();
    back.lse = lse.data();
    back.delta = delta.data();
    back.tiles = scratch.tiles.data();
    back.numbers = scratch.numbers.data();
    back.dq = results.dq.Data();
    back.dq.adds = !is_first && first_keys > 0;
    back.dk = dk.Data();
    back.dv = dv.Data();
    differentiate(back);
    const auto put = [&](const PoisonedArray<Element>& x, int size, PoisonedArray<Element>* all) {
      const size_t width = size_t(shape.num_kv_heads) * size, of_part = (to - from) * width;
      for (int b = 0; b < shape.batch; ++b) {
        std::copy_n(x.wide.begin() + b * of_part, of_part,
                    all->wide.begin() + (size_t(b) * shape.num_keys + from) * width);
      }
    };
    put(dk, H, &results.dk);
    put(dv, Hv, &results.dv);
  }
  for (int b = 0; b < shape.batch; ++b) {
    for (int t = 0; t < shape.num_queries; ++t) {
      for (int n = 0; n < shape.NumHeads(); ++n) {
        const size_t row = problem.Row(b, t, n), query = problem.Query(b, t, n);
        const float total = softmax[1][row];
        CHECK(std::isfinite(softmax[0][row]));
        results.peak[row] = total == 0 ? -INFINITY : softmax[0][row];
        results.lse[row] = results.peak[row] + std::log(total);
        for (int h = 0; h < Hv; ++h) {
          results.out.wide[query * Hv + h] = softmax[2][query * Hv + h] / (total == 0 ? 1 : total);
        }
      }
    }
  }
  return results;
}

// The largest difference, relative to the largest number that is wanted.
template <typename All>
double LargestError(const All& x, const std::vector<double>& wanted) {
  double largest = 0, error = 0;
  for (const double y : wanted) {
    if (std::isfinite(y)) largest = std::fmax(largest, std::fabs(y));
  }
  CHECK(x.size() == wanted.size());
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == wanted[i]) continue;
    const double here = std::fabs(x[i] - wanted[i]) / largest;
    if (!(here <= error) && !std::isnan(error)) error = here;  // also if it is NaN
  }
  return error;
}

// Errors of lse and peak, out, dq, dk and dv.
using AttentionErrors = std::array<double, 5>;

template <typename Element, int H, int Hv>
AttentionErrors ErrorsOf(const AttentionProblem<Element, H, Hv>& problem,
                         const AttentionResults<Element>& results) {
  const double of_peak = LargestError(results.peak, problem.peak);
  return {std::fmax(LargestError(results.lse, problem.lse), of_peak),
          LargestError(results.out, problem.out), LargestError(results.dq, problem.dq),
          LargestError(results.dk, problem.dk), LargestError(results.dv, problem.dv)};
}

inline void Enlarge(AttentionErrors* worst, const AttentionErrors& errors) {
  for (size_t i = 0; i < errors.size(); ++i) (*worst)[i] = std::fmax((*worst)[i], errors[i]);
}

inline void Print(std::FILE* to, const AttentionErrors& errors) {
  std::fprintf(to, "attention, largest errors: lse %.1e, out %.1e, dq %.1e, dk %.1e, dv %.1e\n",
               errors[0], errors[1], errors[2], errors[3], errors[4]);
}

// Probabilities and their derivatives are rounded to 8 bits, and so may results be. `of_lse`: of
// sums in float32.
inline void CheckErrors(const AttentionErrors& errors, double of_lse) {
  CHECK(errors[0] <= of_lse);
  CHECK(errors[1] <= 5e-3);
  for (const int gradient : {2, 3, 4}) CHECK(errors[gradient] <= 8e-3);
}

// Runs a problem in all ways: whole, with float32 and with rounded results, and in two parts. `by`
// is called with each, a function of `attend` and `differentiate`, and returns its results.
template <typename Element, int H, int Hv, typename By>
AttentionErrors RunAttention(std::mt19937& rng, const AttentionShape& shape, double of_lse, By by) {
  const AttentionProblem<Element, H, Hv> problem(rng, shape);
  AttentionErrors worst{};
  const auto check = [&](auto run) {
    const AttentionErrors errors = ErrorsOf(problem, by(run));
    CheckErrors(errors, of_lse);
    Enlarge(&worst, errors);
  };
  for (const bool is_wide : {true, false}) {
    check([&](auto... kernels) { return RunWhole(problem, is_wide, kernels...); });
  }
  if (!shape.has_sink) {
    const int first_keys = static_cast<int>(rng() % (shape.num_keys + 1));
    const bool begins_with_nothing = rng() % 2 == 0;
    check([&](auto... kernels) {
      return RunParts(problem, first_keys, begins_with_nothing, kernels...);
    });
  }
  return worst;
}

}  // namespace cpd::kernels
