// Turns the contributions to one overlapped GEMM, and its buffer, into a schedule that runs.
#include "gemm/plan_overlap.h"

#include <string>
#include <utility>

#include "gemm/comm_overlap.h"
#include "gemm/overlap_buffers.h"
#include "gemm/overlap_contribution.h"
#include "transport/team.h"

namespace cpd {

Status ConfigureByBuffer(const std::string& op, int64_t id, OverlapProblem* problem) {
  OverlapBufferEntry entry;
  Status status = OverlapBuffers::Get().Find(op, id, &entry);
  if (!status.ok()) return status;
  const OverlapBufferSpec& spec = entry.spec;
  const std::string buffer = "buffer " + std::to_string(id);
  if (spec.config.type != problem->config.type || spec.config.method != problem->config.method ||
      spec.num_ranks != problem->num_ranks()) {
    return Status::Invalid(op, ": ", buffer, " is for another call: ", spec.parameters, ".");
  }
  const bool gathers = spec.config.type == CommType::kAllGather;
  const bool is_bulk = spec.config.is_bulk();
  const DataType moved = is_bulk   ? problem->aux_type
                         : gathers ? problem->lhs_type
                                   : problem->partial_type;
  if (spec.type != moved) {
    return Status::Invalid(op, ": ", buffer,
                           " has another dtype than the call moves: ", spec.parameters, ".");
  }
  problem->config = spec.config;
  if (spec.config.aggregate && problem->num_ranks() % 2 != 0) {
    return Status::Invalid(op, ": ", buffer, " is for pairs of ranks, but there are ",
                           problem->num_ranks(), ".");
  }
  if (const int64_t need = BufferBytes(*problem); need > spec.rank_bytes) {
    return Status::Invalid(op, ": ", buffer, " has ", spec.rank_bytes,
                           " bytes per rank but the call needs ", need,
                           ". Create it with a larger buffer_shape.");
  }
  return Status::Ok();
}

namespace {

// The schedule of one call and the resources that it holds.
struct Schedule {
  std::shared_ptr<OverlapBufferLease> lease;
  std::unique_ptr<CommOverlapCore> core;
  std::unique_ptr<Team> team;
  std::vector<int> tasks;
};

}  // namespace

Status PlanOverlap(const Exchange& exchange, OverlapProblem problem, int64_t buffer_id,
                   GemmFunction gemm,
                   const std::vector<std::unique_ptr<Contribution>>& contributions,
                   WorkList* work) {
  const bool is_between_processes = !work->elsewhere.holds.empty();
  for (const auto& contribution : contributions) {
    const auto& rank = static_cast<const OverlapContribution&>(*contribution);
    problem.ranks.push_back(is_between_processes ? rank.Share(work) : rank.memory());
  }
  auto schedule = std::make_shared<Schedule>();
  const int num_ranks = problem.num_ranks();
  if (buffer_id != 0) {
    const Status status =
        OverlapBuffers::Get().Lease(exchange.op, buffer_id, exchange.key.group,
                                    /*has_memory=*/!is_between_processes, &schedule->lease);
    if (!status.ok()) return status;
    for (int rank = 0; rank < num_ranks && !is_between_processes; ++rank) {
      problem.ranks[rank].buffer = schedule->lease->memory(rank);
    }
  }
  schedule->core =
      MakeCommOverlap(std::move(problem), std::make_shared<HostArithmetic>(std::move(gemm)));
  const auto group = static_cast<int>(exchange.key.group);
  schedule->team =
      std::make_unique<Team>(Team::Call{exchange.op, group, exchange.deadline}, num_ranks,
                             schedule->core->num_signals(), CopyRows, work->elsewhere);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule->core->Record(rank, schedule->team->streams(rank));
  }
  schedule->tasks = schedule->team->Tasks();
  work->num_tasks = static_cast<int64_t>(schedule->tasks.size());
  work->tasks_wait = true;
  work->run = [schedule](int64_t task) { schedule->team->Run(schedule->tasks[task]); };
  work->outcome = [schedule] { return schedule->team->status(); };
  work->add = [schedule](int rank, int counter) { schedule->team->Add(rank, counter); };
  work->fail = [schedule](const Status& status) { schedule->team->Fail(status); };
  if (schedule->lease && !is_between_processes) {
    work->gate = [schedule](std::function<void()> begin) {
      schedule->lease->Enter(std::move(begin));
    };
  }
  return Status::Ok();
}

}  // namespace cpd
