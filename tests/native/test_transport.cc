// The transport within one process, without XLA and Python: ranks are threads, under a load that a
// JAX program cannot reproduce.
#include "loops.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_transport {

void LoopsOfGroups(int num_ranks, int num_groups, int num_rounds) {
  constexpr int64_t kRowFloats = 1 << 11;  // a round has several pieces of work
  std::vector<std::unique_ptr<Helpers>> helpers;
  for (int i = 0; i < num_groups * num_ranks; ++i) helpers.push_back(std::make_unique<Helpers>(i));
  loops::Run(
      num_groups, num_ranks, num_rounds, kRowFloats,
      [&](int group, int rank, Direction direction, std::unique_ptr<Contribution> mine) {
        const bool forth = direction == Direction::kDispatch;
        Exchange exchange{"loop", {100, forth, group}, num_ranks, std::chrono::minutes(1), {}};
        exchange.planner = [forth](const auto& ranks, WorkList* work) {
          return (forth ? PlanDispatch : PlanCombine)("loop", ranks, work, {});
        };
        return Join(exchange, rank, std::move(mine), std::ref(*helpers[group * num_ranks + rank]));
      });
}

const Register kTests("test_transport", [](const Numbers&) {
  LoopsOfGroups(2, 1, 40);
  LoopsOfGroups(4, 2, 10);
  LoopsOfGroups(1, 3, 10);
});

}  // namespace cpd::test_transport
