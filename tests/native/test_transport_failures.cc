// Failures of the transport within one process: every rank of an execution gets the error.
#include <stdexcept>

#include "native_test.h"
#include "ranks.h"

namespace cpd::test_transport_failures {

using std::chrono::milliseconds;

void EveryRankGetsThePlannersError(int64_t run_id, const Planner& planner, const char* message) {
  for (auto& status : JoinAll(ExchangeOf(run_id, 3, planner))) {
    CHECK(Contains(status.get(), message));
  }
}

void LateRanksFindTheError() {
  const Exchange exchange = ExchangeOf(2, 3, kNothingToDo, milliseconds(2000));
  auto first = Join(exchange, 0), second = Join(exchange, 2);
  CHECK(Contains(first.get(), "2/3 ranks arrived, ranks [0, 2] wait for missing ranks [1]"));
  CHECK(Contains(second.get(), "missing ranks [1]"));
  // Had it waited for a meeting of its own, the others would be missing.
  CHECK(Contains(Join(exchange, 1).get(), "2/3 ranks arrived, ranks [0, 2] wait for missing"));
}

// Other groups and other calls of a failed execution fail too; other executions continue.
void OneFailureFailsTheExecution() {
  Exchange exchange = ExchangeOf(6, 2, kNothingToDo);
  Exchange group = exchange, call = exchange, other = exchange;
  group.key.group = 1;
  call.key.call_site = 2;
  other.key.run_id = 7;
  exchange.planner = [](const auto&, WorkList*) { return Status::Invalid("no such plan"); };
  auto in_group = Join(group, 0), in_call = Join(call, 1), in_other = Join(other, 0);
  auto first = Join(exchange, 0), second = Join(exchange, 1), late = Join(group, 1);
  for (auto* status : {&in_group, &in_call, &first, &second, &late}) {
    CHECK(Contains(status->get(), "no such plan"));
  }
  CHECK(Join(other, 1).get().ok());
  CHECK(in_other.get().ok());
}

void RanksThatCannotBe(int64_t run_id, int rank, const char* message) {
  const Exchange exchange = ExchangeOf(run_id, 3, kNothingToDo);
  auto waiting = Join(exchange, 0), wrong = Join(exchange, rank), late = Join(exchange, 1);
  for (auto* status : {&waiting, &wrong, &late}) CHECK(Contains(status->get(), message));
}

// A rank that arrived with another operation is named, together with this operation.
void RanksInAnotherCallAreNamed() {
  Exchange dispatch = ExchangeOf(8, 3, kNothingToDo, milliseconds(100));
  Exchange combine = dispatch, in_other_group = dispatch, in_other_run = dispatch;
  dispatch.op = "dispatch over axis 'cp'";
  combine.op = "combine over axis 'cp'";
  combine.deadline = in_other_group.deadline = in_other_run.deadline = milliseconds(20000);
  combine.key.call_site = in_other_group.key.call_site = in_other_run.key.call_site = 2;
  in_other_group.key.group = 1;
  in_other_run.key.run_id = 9;
  std::vector<std::future<Status>> ranks;
  ranks.push_back(Join(combine, 1));
  ranks.push_back(Join(in_other_group, 2));
  auto unconcerned = Join(in_other_run, 2);
  ranks.push_back(Join(dispatch, 0));
  for (auto& status : ranks) {
    const Status result = status.get();
    CHECK(Contains(result, "missing ranks [1, 2]. Rank 1 waits in another call: combine over"));
    CHECK(result.message.find("Rank 2") == std::string::npos);
  }
  Join(in_other_run, 0), Join(in_other_run, 1);
  CHECK(unconcerned.get().ok());
}

// A rank that may not join fails the ranks that wait for it and those that come later.
void ARefusedRankFailsTheExecution() {
  const Exchange exchange = ExchangeOf(13, 3, kNothingToDo);
  Exchange call = exchange;
  call.key.call_site = 2;
  auto waiting = Join(exchange, 0), in_call = Join(call, 2);
  auto refused = Refuse(exchange, Status::Invalid("no such buffer"));
  auto late = Join(exchange, 2), again = Refuse(call, Status::Invalid("no such buffer"));
  for (auto* status : {&waiting, &in_call, &refused, &late, &again}) {
    CHECK(Contains(status->get(), "no such buffer"));
  }
}

const Register kTests("test_transport_failures", [](const Numbers&) {
  EveryRankGetsThePlannersError(
      3, [](const auto&, WorkList*) { return Status::Invalid("no such plan"); }, "no such plan");
  EveryRankGetsThePlannersError(
      4, [](const auto&, WorkList*) -> Status { throw std::runtime_error("out of paper"); },
      "out of paper");
  LateRanksFindTheError();
  OneFailureFailsTheExecution();
  RanksInAnotherCallAreNamed();
  ARefusedRankFailsTheExecution();
  RanksThatCannotBe(10, 0, "rank 0 arrived twice; ranks are 0..2");
  RanksThatCannotBe(11, 3, "rank 3 arrived but ranks are 0..2");
  RanksThatCannotBe(12, -1, "rank -1 arrived but ranks are 0..2");
});

}  // namespace cpd::test_transport_failures
