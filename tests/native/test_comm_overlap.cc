// Values of overlapped GEMMs: each schedule against a plain computation, the order in which ranks
// are summed, and the rounding of sums.
#include "native_test.h"
#include "overlap_call.h"
#include "overlap_problems.h"

namespace cpd::test_comm_overlap {

void ResultsAreThoseOfAPlainComputation(int num_ranks, int64_t num_batches, int64_t empty_room) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < num_ranks; ++rank) counts.push_back((3 * rank + 2) % 5);  // rank 1: 0
  bool is_odd = false;
  for (OverlapProblem& problem : AllProblems(counts)) {
    problem.rows.num_batches = num_batches;
    problem.rows.capacity += empty_room;
    is_odd = !is_odd;
    problem.rhs_transposed = is_odd;
    // Rows of a transposed array are not contiguous, so they are never gathered.
    const bool can_transpose = problem.config.type == CommType::kReduceScatter ||
                               problem.config.method == CommMethod::kBulk;
    problem.lhs_transposed = can_transpose && is_odd != (empty_room > 0);
    if (num_batches > 1 && is_odd) {
      problem.lhs_type = problem.output_type = problem.aux_type = problem.partial_type =
          DataType::kBF16;
    }
    const Call call(problem, /*has_bias=*/is_odd == (num_batches > 1));
    CHECK(call.Run().ok());
    CHECK(call.IsRight());
  }
}

// In float32, 1e8 + 1 is 1e8.
void RanksAreSummedInTheirOrder() {
  constexpr float kParts[] = {1e8f, 1, -1e8f, 1, 0.5f};
  constexpr float kSum = 1.5f;
  static_assert(kParts[4] + kParts[3] + kParts[2] + kParts[1] + kParts[0] != kSum, "");
  const auto values = [&](ArrayName name, int rank, int64_t, int64_t) {
    return name == kLhs ? 1.0f : kParts[rank];
  };
  for (OverlapProblem& problem : ReducingProblems({2, 1, 3, 0, 2})) {
    problem.k = 1;
    const Call call(problem, /*has_bias=*/false, values);
    CHECK(call.Run().ok());
    CHECK(call.IsRight());
    const bool is_bulk = problem.config.method == CommMethod::kBulk;
    CHECK((is_bulk ? call.aux_out(2) : call.output(2))(0, 0) == kSum);
  }
}

// 1 + 2^-9 is 1 in bfloat16, but three times 1 + 2^-7 is more than 3.
void PartsAreRoundedAndSumsAreWide() {
  for (const float low : {0x1p-9f, 0x1p-7f}) {
    for (OverlapProblem& problem : ReducingProblems({1, 2, 1})) {
      if (!problem.config.copies) continue;  // it has no addends
      problem.k = 1;
      problem.partial_type = problem.aux_type = DataType::kBF16;
      const Call call(problem, /*has_bias=*/false, [&](ArrayName name, int, int64_t, int64_t) {
        return name == kLhs ? 1.0f : 1 + low;
      });
      CHECK(call.Run().ok());
      CHECK(call.IsRight());
      if (problem.config.method == CommMethod::kBulk) continue;
      CHECK(call.output(1)(1, 0) == (low == 0x1p-9f ? 3 : 3 * (1 + 0x1p-7f)));
    }
  }
}

const Register kTests("test_comm_overlap", [](const Numbers&) {
  for (const int num_ranks : {1, 2, 3, 4, 5, 8}) {
    ResultsAreThoseOfAPlainComputation(num_ranks, /*num_batches=*/1, /*empty_room=*/0);
    ResultsAreThoseOfAPlainComputation(num_ranks, /*num_batches=*/1, /*empty_room=*/2);
    ResultsAreThoseOfAPlainComputation(num_ranks, /*num_batches=*/3, /*empty_room=*/2);
  }
  RanksAreSummedInTheirOrder();
  PartsAreRoundedAndSumsAreWide();
});

}  // namespace cpd::test_comm_overlap
