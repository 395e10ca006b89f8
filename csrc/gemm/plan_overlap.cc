// From what the ranks of one overlapped GEMM bring to the schedule that runs, with its buffer.
#include "gemm/plan_overlap.h"

#include <string>
#include <utility>

#include "gemm/overlap_buffers.h"
#include "transport/team.h"

namespace cpd {
namespace {

Status TakeBuffer(const std::string& op, int64_t id, int64_t group, OverlapProblem* problem,
                  std::shared_ptr<OverlapBufferLease>* lease) {
  OverlapBufferSpec spec;
  Status status = OverlapBuffers::Get().Find(op, id, &spec);
  if (!status.ok()) return status;
  const std::string buffer = "buffer " + std::to_string(id);
  if (spec.config.type != problem->config.type || spec.config.method != problem->config.method ||
      spec.num_ranks != problem->num_ranks()) {
    return Status::Invalid(op + ": " + buffer + " is for another call: " + spec.parameters + ".");
  }
  const bool gathers = spec.config.type == CommType::kAllGather;
  const bool is_bulk = spec.config.method == CommMethod::kBulk;
  const DataType moved = is_bulk   ? problem->aux_type
                         : gathers ? problem->lhs_type
                                   : problem->partial_type;
  if (spec.type != moved) {
    return Status::Invalid(op + ": " + buffer + " is of another dtype than what the call moves: " +
                           spec.parameters + ".");
  }
  problem->config = spec.config;
  if (const int64_t need = BufferBytes(*problem); need > spec.rank_bytes) {
    return Status::Invalid(op + ": " + buffer + " has " + std::to_string(spec.rank_bytes) +
                           " bytes per rank but the call needs " + std::to_string(need) +
                           ". Create it with a larger buffer_shape.");
  }
  status = OverlapBuffers::Get().Lease(op, id, group, lease);
  if (!status.ok()) return status;
  for (size_t rank = 0; rank < problem->ranks.size(); ++rank) {
    problem->ranks[rank].buffer = (*lease)->memory(static_cast<int>(rank));
  }
  return Status::Ok();
}

// The schedule of one call, and what it holds until it is over.
struct Schedule {
  std::shared_ptr<OverlapBufferLease> lease;
  std::unique_ptr<CommOverlapCore> core;
  std::unique_ptr<Team> team;
  std::vector<int> tasks;
};

}  // namespace

Status PlanOverlap(const Exchange& exchange, OverlapProblem problem, int64_t buffer_id,
                   int num_threads, const std::vector<std::unique_ptr<Contribution>>& contributions,
                   WorkList* work) {
  for (const auto& contribution : contributions) {
    problem.ranks.push_back(static_cast<const OverlapContribution&>(*contribution).memory);
  }
  auto schedule = std::make_shared<Schedule>();
  if (buffer_id != 0) {
    const Status status =
        TakeBuffer(exchange.op, buffer_id, exchange.key.group, &problem, &schedule->lease);
    if (!status.ok()) return status;
  }
  const int num_ranks = problem.num_ranks();
  schedule->core = MakeCommOverlap(
      std::move(problem), std::make_shared<HostArithmetic>(
                              [num_threads](const GemmTask& task) { RunGemm(task, num_threads); }));
  schedule->team =
      std::make_unique<Team>(exchange.op, static_cast<int>(exchange.key.group), num_ranks,
                             schedule->core->num_signals(), exchange.deadline);
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule->core->Record(rank, schedule->team->streams(rank));
  }
  schedule->tasks = schedule->team->Tasks();
  work->num_tasks = static_cast<int64_t>(schedule->tasks.size());
  work->tasks_wait = true;
  work->run = [schedule](int64_t task) { schedule->team->Run(schedule->tasks[task]); };
  work->outcome = [schedule] { return schedule->team->status(); };
  if (schedule->lease) {
    work->gate = [schedule](std::function<void()> begin) {
      schedule->lease->Enter(std::move(begin));
    };
  }
  return Status::Ok();
}

}  // namespace cpd
