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

// Query heads of a group attend to the same keys: their rows follow one another in a matrix.
struct AttentionShape {
  int num_queries, group, num_keys;
  int first_keys;  // of a first call, whose online softmax goes into a second one with the others
  int num_matrices = 2;
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
  const int group = 1 << draw(0, 3), num_keys = size(256);
  return {size(240 / group + 40), group, num_keys, draw(0, num_keys), draw(1, 3)};
}

inline float WideBf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline uint16_t RoundBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The operands, and what plain loops compute.
template <int H>
struct AttentionProblem {
  AttentionShape shape;
  int num_rows;
  Seen<uint16_t> q, k, v, dout;
  Seen<int32_t> start, end;
  std::vector<double> out, lse, delta, dq, dk, dv;

  AttentionProblem(std::mt19937& rng, const AttentionShape& shape)
      : shape(shape), num_rows(shape.num_queries * shape.group) {
    const size_t rows = size_t(shape.num_matrices) * num_rows;
    const size_t keys = size_t(shape.num_matrices) * shape.num_keys;
    for (Seen<uint16_t>* x : {&q, &dout}) Draw(rng, rows * H, x);
    for (Seen<uint16_t>* x : {&k, &v}) Draw(rng, keys * H, x);
    for (int m = 0; m < shape.num_matrices; ++m) DrawRanges(rng);
    out.assign(rows * H, 0);
    dq = out;
    lse.assign(rows, -INFINITY);
    delta.assign(rows, 0);
    dk.assign(keys * H, 0);
    dv = dk;
    for (size_t row = 0; row < rows; ++row) Compute(row, row / num_rows * shape.num_keys);
  }

  // The operands of the keys [from, to) in arrays of their own.
  struct Part {
    Seen<uint16_t> k, v;
    Seen<int32_t> start, end;
  };
  Part Keys(int from, int to) const {
    Part part{{}, {}, start, end};
    for (int m = 0; m < shape.num_matrices; ++m) {
      const auto take = [&](Seen<uint16_t>* out, const Seen<uint16_t>& x) {
        const auto matrix = x.begin() + int64_t{m} * shape.num_keys * H;
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
    return {
        q.data(),           part.k.data(), part.v.data(), part.start.data(),      part.end.data(),
        shape.num_matrices, num_rows,      keys,          1 / std::sqrt(float{H})};
  }

 private:
  static void Draw(std::mt19937& rng, size_t size, Seen<uint16_t>* x) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < size; ++i) x->push_back(RoundBf16(normal(rng)));
  }

  // Documents, windows, random and empty ranges; the same for all heads of the group.
  void DrawRanges(std::mt19937& rng) {
    const int num_keys = shape.num_keys;
    const auto below = [&](int n) { return static_cast<int>(rng() % n); };
    std::vector<int32_t> from, to;
    for (int i = 0, document = 0; i < shape.num_queries; ++i) {
      if (below(40) == 0) document = std::min(i, num_keys - 1);
      int first = document, last = std::min(i + 1, num_keys);
      if (i / 32 % 3 == 2) first = below(num_keys), last = std::min(num_keys, first + below(80));
      if (below(9) == 0 || last <= first) first = num_keys, last = 0;  // as cut_ranges() has it
      from.push_back(first);
      to.push_back(last);
    }
    for (int head = 0; head < shape.group; ++head) {
      start.insert(start.end(), from.begin(), from.end());
      end.insert(end.end(), to.begin(), to.end());
    }
  }

  static double Dot(const Seen<uint16_t>& x, size_t i, const Seen<uint16_t>& y, size_t j) {
    double sum = 0;
    for (int h = 0; h < H; ++h) sum += double{WideBf16(x[i * H + h])} * WideBf16(y[j * H + h]);
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
        out[row * H + h] += p[j] * WideBf16(v[key * H + h]);
        dv[key * H + h] += p[j] * WideBf16(dout[row * H + h]);
      }
    }
    for (int h = 0; h < H; ++h) delta[row] += out[row * H + h] * WideBf16(dout[row * H + h]);
    for (size_t j = 0; j < p.size(); ++j) {
      const size_t key = keys + start[row] + j;
      const double dx = p[j] * (Dot(dout, row, v, key) - delta[row]) / std::sqrt(double{H});
      for (int h = 0; h < H; ++h) {
        dq[row * H + h] += dx * WideBf16(k[key * H + h]);
        dk[key * H + h] += dx * WideBf16(q[row * H + h]);
      }
    }
  }
};

// What the kernels leave: the softmax of all keys, and the gradients.
struct AttentionResults {
  Seen<float> softmax[3];       // peak, total, acc
  std::vector<Seen<float>> dq;  // of each set of keys
  Seen<float> dk, dv;

  bool operator==(const AttentionResults& other) const {
    const auto same = [](const Seen<float>& x, const Seen<float>& y) {
      return x.size() == y.size() && std::memcmp(x.data(), y.data(), 4 * x.size()) == 0;
    };
    return std::equal(softmax, softmax + 3, other.softmax, same) && same(dk, other.dk) &&
           std::equal(dq.begin(), dq.end(), other.dq.begin(), other.dq.end(), same) &&
           same(dv, other.dv);
  }
};

// Runs `attend(AttendCall)` and `differentiate(GradientsCall)` on both sets of keys. The softmax
// begins with no argument, or with that of no key.
template <int H, typename Attend, typename Differentiate>
AttentionResults RunAttention(const AttentionProblem<H>& problem, bool begins_with_nothing,
                              Attend attend, Differentiate differentiate) {
  constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  const AttentionShape& shape = problem.shape;
  const size_t rows = problem.start.size();
  AttentionResults results;
  results.dk.assign(problem.dk.size(), kPoison);
  results.dv = results.dk;
  Seen<float> seen[3], lse(problem.lse.begin(), problem.lse.end());
  for (float& x : lse) x = x == -INFINITY ? INFINITY : x;  // as cut_cotangents() has it
  const Seen<float> delta(problem.delta.begin(), problem.delta.end());
  if (begins_with_nothing) {  // as OnlineSoftmax.of_nothing() has it
    seen[0].assign(rows, std::numeric_limits<float>::lowest());
    seen[1].assign(rows, 0);
    seen[2].assign(rows * H, 0);
  }
  for (const bool is_first : {true, false}) {
    const int from = is_first ? 0 : shape.first_keys;
    const int keys = is_first ? shape.first_keys : shape.num_keys - shape.first_keys;
    if (keys == 0) continue;
    const auto held = problem.Keys(from, from + keys);
    AttendCall call{problem.Operands(held, keys), {}, {}, {}, {}, {}, {}};
    if (!seen[0].empty()) {
      call.seen_peak = seen[0].data();
      call.seen_total = seen[1].data();
      call.seen_acc = seen[2].data();
    }
    for (int i = 0; i < 3; ++i) results.softmax[i].assign(i == 2 ? rows * H : rows, kPoison);
    call.peak = results.softmax[0].data();
    call.total = results.softmax[1].data();
    call.acc = results.softmax[2].data();
    attend(call);
    for (int i = 0; i < 3; ++i) seen[i] = results.softmax[i];

    const size_t of_keys = size_t(keys) * H;  // elements of a matrix
    Seen<float> dk(shape.num_matrices * of_keys, kPoison), dv(dk);
    const int num_tiles = (problem.num_rows + kTile - 1) / kTile;
    Seen<int32_t> reach(size_t(2) * shape.num_matrices * num_tiles, -1);
    results.dq.emplace_back(rows * H, kPoison);
    differentiate(GradientsCall{problem.Operands(held, keys), problem.dout.data(), lse.data(),
                                delta.data(), reach.data(), results.dq.back().data(), dk.data(),
                                dv.data()});
    for (int m = 0; m < shape.num_matrices; ++m) {
      const size_t to = (size_t(m) * shape.num_keys + from) * H;
      std::copy_n(dk.begin() + m * of_keys, of_keys, results.dk.begin() + to);
      std::copy_n(dv.begin() + m * of_keys, of_keys, results.dv.begin() + to);
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

// Errors of lse, out, dq, dk and dv.
using AttentionErrors = std::array<double, 5>;

template <int H>
AttentionErrors ErrorsOf(const AttentionProblem<H>& problem, const AttentionResults& results) {
  const auto& [peak, total, acc] = results.softmax;
  const size_t rows = problem.start.size();
  std::vector<double> out(rows * H), lse(rows), dq(rows * H);
  for (size_t i = 0; i < rows; ++i) {
    CHECK(std::isfinite(peak[i]));
    lse[i] = total[i] == 0 ? -INFINITY : peak[i] + std::log(double{total[i]});
    for (int h = 0; h < H; ++h) out[i * H + h] = acc[i * H + h] / (total[i] == 0 ? 1 : total[i]);
  }
  for (const auto& of_keys : results.dq) {
    for (size_t i = 0; i < dq.size(); ++i) dq[i] += of_keys[i];
  }
  return {LargestError(lse, problem.lse), LargestError(out, problem.out),
          LargestError(dq, problem.dq), LargestError(results.dk, problem.dk),
          LargestError(results.dv, problem.dv)};
}

inline void Enlarge(AttentionErrors* worst, const AttentionErrors& errors) {
  for (size_t i = 0; i < errors.size(); ++i) (*worst)[i] = std::fmax((*worst)[i], errors[i]);
}

inline void Print(std::FILE* to, const AttentionErrors& errors) {
  std::fprintf(to, "attention, largest errors: lse %.1e, out %.1e, dq %.1e, dk %.1e, dv %.1e\n",
               errors[0], errors[1], errors[2], errors[3], errors[4]);
}

// Probabilities and their derivatives are rounded to 8 bits. `of_lse`: of sums in float32.
inline void CheckErrors(const AttentionErrors& errors, double of_lse) {
  CHECK(errors[0] <= of_lse);
  CHECK(errors[1] <= 4e-3);
  for (const int gradient : {2, 3, 4}) CHECK(errors[gradient] <= 6e-3);
}

}  // namespace cpd::kernels
