// Exchanges whole pieces, and cuts tails where that does not help.
#include "planner/repair.h"

#include "planner/exchange_pieces.h"
#include "planner/rank_loads.h"
#include "planner/shift_tail.h"

namespace cpd {
namespace {

constexpr int64_t kSteps = 8;       // for each rank above the limit, and
constexpr int64_t kMoreSteps = 24;  // additional steps in total

}  // namespace

void RepairBalance(const PlacementProblem& problem, RankPieces* ranks) {
  RankLoads loads(problem, ranks);
  PieceExchange exchange(problem, &loads);
  const int64_t num_steps = kSteps * loads.NumAbove() + kMoreSteps;
  for (int64_t step = 0; step < num_steps; ++step) {
    const int64_t heavy = loads.Heaviest();
    if (loads.Room(heavy) >= 0 || !exchange.IsOpen()) return;
    if (exchange.Apply(heavy)) continue;
    const int64_t other = ShiftTail(problem, heavy, &loads);
    if (other < 0) return;
    exchange.Forget(heavy);
    exchange.Forget(other);
  }
}

}  // namespace cpd
