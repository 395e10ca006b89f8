// Attention to one range of keys per query: random operands, and the results of plain loops in
// double precision.
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
    lse.assign(queries, -INFINITY);
    peak = lse;
    delta.assign(queries, 0);
    dv.assign(keys * Hv, 0);
    for (int b = 0; b < shape.batch; ++b) {
      for (int t = 0; t < shape.num_queries; ++t) {
        for (int n = 0; n < shape.NumHeads(); ++n) Compute(b, t, n);
      }
    }
    Differentiate(out, &dq, &dk);
    SpoilUnused();
  }

  // dq and dk of a softmax whose output is `given`, perhaps rounded.
  template <typename Out>
  void Differentiate(const Out& given, std::vector<double>* to_q, std::vector<double>* to_k) const {
    to_q->assign(out.size() / Hv * H, 0);
    to_k->assign(dv.size() / Hv * H, 0);
    for (const Pair& pair : pairs) {
      double dx = dlse[pair.row];
      for (int h = 0; h < Hv; ++h) {
        const double change = At(v, pair.key * Hv + h) - given[pair.query * Hv + h];
        dx += At(dout, pair.query * Hv + h) * change;
      }
      for (int h = 0; h < H; ++h) {
        (*to_q)[pair.query * H + h] += pair.slope * dx * At(k, pair.key * H + h);
        (*to_k)[pair.key * H + h] += pair.slope * dx * At(q, pair.query * H + h);
      }
    }
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
  // A query and a key that it sees, and the derivative of the probability.
  struct Pair {
    size_t query, row, key;
    double slope;
  };
  std::vector<Pair> pairs;

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
      pairs.push_back({query, row, keys[j], p[j] * slope[j] * scale});
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

}  // namespace cpd::kernels
