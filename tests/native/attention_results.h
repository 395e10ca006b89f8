// What the kernels of attention leave, run on a GPU or on the host, and its errors.
#pragma once

#include "attention_problem.h"
#include "kernels/attention_gradients.h"

namespace cpd::kernels {

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

// `has_given_out`: whether the gradients are those of the output that the kernels have written.
template <typename Element, int H, int Hv>
AttentionErrors ErrorsOf(const AttentionProblem<Element, H, Hv>& problem,
                         const AttentionResults<Element>& results, bool has_given_out) {
  std::vector<double> dq(problem.dq), dk(problem.dk);
  if (has_given_out) problem.Differentiate(results.out, &dq, &dk);
  const double of_peak = LargestError(results.peak, problem.peak);
  return {std::fmax(LargestError(results.lse, problem.lse), of_peak),
          LargestError(results.out, problem.out), LargestError(results.dq, dq),
          LargestError(results.dk, dk), LargestError(results.dv, problem.dv)};
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
  const auto check = [&](bool has_given_out, auto run) {
    const AttentionErrors errors = ErrorsOf(problem, by(run), has_given_out);
    CheckErrors(errors, of_lse);
    Enlarge(&worst, errors);
  };
  for (const bool is_wide : {true, false}) {
    check(true, [&](auto... kernels) { return RunWhole(problem, is_wide, kernels...); });
  }
  if (!shape.has_sink) {
    const int first_keys = static_cast<int>(rng() % (shape.num_keys + 1));
    const bool begins_with_nothing = rng() % 2 == 0;
    check(false, [&](auto... kernels) {
      return RunParts(problem, first_keys, begins_with_nothing, kernels...);
    });
  }
  return worst;
}

}  // namespace cpd::kernels
