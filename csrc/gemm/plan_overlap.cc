// What ranks contribute to an overlapped GEMM, the registry of its buffers, and its plan.
#include "gemm/plan_overlap.h"

#include <algorithm>
#include <exception>

#include "transport/team.h"

namespace cpd {

// ---- The registry of communication buffers of overlapped GEMMs: descriptions and memory under
// ids.

OverlapBuffers& OverlapBuffers::Get() {
  static auto* buffers = new OverlapBuffers;
  return *buffers;
}

Status OverlapBuffers::Create(const std::string& op, int64_t id, const OverlapBufferSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  OverlapBuffer& buffer = buffers_[id];
  if (buffer.num_created > 0 && buffer.spec.parameters != spec.parameters) {
    return Status::Invalid(op, ": id ", id, " already denotes (", buffer.spec.parameters,
                           "), not (", spec.parameters,
                           "): two sets of arguments have the same hash. Change "
                           "an argument that does not matter to you, for example gemm_priority.");
  }
  buffer.spec = spec;
  ++buffer.num_created;
  destroyed_.erase(id);
  return Status::Ok();
}

Status OverlapBuffers::Lease(const std::string& op, int64_t id, int64_t group, bool has_memory,
                             std::shared_ptr<OverlapBufferLease>* lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end()) return NoSuchBuffer(op, id);
  OverlapBuffer& buffer = found->second;
  const OverlapBufferSpec& spec = buffer.spec;
  std::vector<char*> memory;
  try {
    if (has_memory) {
      auto& shared = buffer.groups[group];
      if (shared == nullptr) shared = std::make_shared<OverlapBuffer::Group>();
      OverlapBuffer::Group& of_group = *shared;
      while (of_group.memory.size() < static_cast<size_t>(spec.num_ranks)) {
        of_group.memory.emplace_back(new char[spec.rank_bytes]);  // touched when written
      }
      for (const auto& rank : of_group.memory) memory.push_back(rank.get());
    }
    *lease = std::make_shared<OverlapBufferLease>(id, group, std::move(memory));
  } catch (const std::exception&) {
    return Status::Internal(op, ": no memory for buffer ", id, ": ", spec.num_ranks, " ranks of ",
                            spec.rank_bytes, " bytes. Create it with a smaller buffer_shape.");
  }
  ++buffer.num_in_use;
  ++buffer.num_calls;
  return Status::Ok();
}

void OverlapBufferLease::Enter(std::function<void()> begin) {
  {
    OverlapBuffers& all = OverlapBuffers::Get();
    std::lock_guard<std::mutex> lock(all.mutex_);
    OverlapBuffer::Group& group = *all.buffers_.at(id_).groups.at(group_);
    entered_ = true;
    if (group.is_busy) {
      group.waiting.push_back(std::move(begin));
      return;
    }
    group.is_busy = true;
  }
  begin();
}

OverlapBufferLease::~OverlapBufferLease() {
  std::function<void()> next;
  {
    OverlapBuffers& all = OverlapBuffers::Get();
    std::lock_guard<std::mutex> lock(all.mutex_);
    OverlapBuffer& buffer = all.buffers_.at(id_);
    --buffer.num_in_use;
    if (entered_) {
      OverlapBuffer::Group& group = *buffer.groups.at(group_);
      if (group.waiting.empty()) {
        group.is_busy = false;
      } else {
        next = std::move(group.waiting.front());
        group.waiting.pop_front();
      }
    }
  }
  if (next) next();
}

Status OverlapBuffers::NoSuchBuffer(const std::string& op, int64_t id) const {
  const bool is_gone = destroyed_.count(id) > 0;
  return Status::Invalid(
      op, is_gone ? ": buffer " : ": there is no buffer ", id,
      is_gone ? " has been destroyed. " : ". ",
      "Create it with create_comm_overlap_buffer, in every process that runs the program.");
}

// ---- Turns the contributions to one overlapped GEMM, and its buffer, into a schedule that runs.

Status ConfigureByBuffer(const std::string& op, int64_t id, OverlapProblem* problem) {
  OverlapBuffer entry;
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

// One call, and the resources that it holds.
struct Planned {
  std::shared_ptr<OverlapBufferLease> lease;
  std::unique_ptr<CommOverlap> core;
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
  auto plan = std::make_shared<Planned>();
  const int num_ranks = problem.num_ranks();
  if (buffer_id != 0) {
    const Status status =
        OverlapBuffers::Get().Lease(exchange.op, buffer_id, exchange.key.group,
                                    /*has_memory=*/!is_between_processes, &plan->lease);
    if (!status.ok()) return status;
    for (int rank = 0; rank < num_ranks && !is_between_processes; ++rank) {
      problem.ranks[rank].buffer = plan->lease->memory(rank);
    }
  }
  plan->core =
      MakeCommOverlap(std::move(problem), std::make_shared<HostArithmetic>(std::move(gemm)));
  const auto group = static_cast<int>(exchange.key.group);
  plan->team = std::make_unique<Team>(Team::Call{exchange.op, group, exchange.deadline},
                                      plan->core->Record(), plan->core->num_signals(), CopyRows,
                                      work->elsewhere);
  plan->tasks = plan->team->Tasks();
  work->num_tasks = static_cast<int64_t>(plan->tasks.size());
  work->tasks_wait = true;
  work->run = [plan](int64_t task) { plan->team->Run(plan->tasks[task]); };
  work->outcome = [plan] { return plan->team->status(); };
  work->add = [plan](int rank, int counter) { plan->team->Add(rank, counter); };
  work->fail = [plan](const Status& status) { plan->team->Fail(status); };
  if (plan->lease && !is_between_processes) {
    work->gate = [plan](std::function<void()> begin) { plan->lease->Enter(std::move(begin)); };
  }
  return Status::Ok();
}

}  // namespace cpd
