// Copy planning: turns the contributions of the ranks of one dispatch or combine into copies.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dispatch/messages.h"
#include "dispatch/segments.h"
#include "numerics/rows.h"

namespace cpd {
namespace {

// Target size of a task in bytes: large enough to hide its bookkeeping, small enough to share.
constexpr int64_t kTaskBytes = 512 << 10;

// The operand groups of all ranks, one by one; every rank contributes the same number.
Status SplitGroups(const std::string& op,
                   const std::vector<std::unique_ptr<Contribution>>& contributions,
                   std::vector<Ranks>* groups) {
  for (size_t r = 0; r < contributions.size(); ++r) {
    const auto* rank = static_cast<const DispatchContribution*>(contributions[r].get());
    if (r == 0) groups->resize(rank->groups.size());
    if (rank->groups.size() != groups->size()) {
      return Status::Invalid(op, ": rank ", r, " has ", rank->groups.size(),
                             " plans but rank 0 has ", groups->size(),
                             ". All ranks must run the same program.");
    }
    for (size_t p = 0; p < groups->size(); ++p) (*groups)[p].push_back(&rank->groups[p]);
  }
  return Status::Ok();
}

// The start of a message about one operand group: its number if there are several.
std::string GroupName(const std::string& op, size_t group, size_t num_groups) {
  if (num_groups == 1) return op;
  return op + ", plan " + std::to_string(group) + " of 0.." + std::to_string(num_groups - 1);
}

// The name of the argument that sets the capacity of a group.
std::string CapacityName(const std::string& names, size_t group) {
  size_t begin = 0;
  for (; group > 0 && begin != std::string::npos; --group) {
    const size_t comma = names.find(',', begin);
    begin = comma == std::string::npos ? comma : comma + 1;
  }
  const std::string name =
      begin == std::string::npos ? "" : names.substr(begin, names.find(',', begin) - begin);
  return name.empty() ? "capacity" : name;
}

// Names the need of every group, so that the next attempt does not fail on another one.
Status RefuseOverflows(std::string message, const std::vector<Ranks>& groups,
                       const std::string& capacity_names) {
  for (size_t p = 0; p < groups.size(); ++p) {
    const std::string overflow = DescribeOverflow(groups[p], CapacityName(capacity_names, p));
    if (message.find(overflow) == std::string::npos) message += " " + overflow;
  }
  return Status::Invalid(message);
}

// Any group of a fallback may exceed the numbers of ranges or pieces too, which only the host
// knows.
Status RefuseFallback(const std::string& op, const std::vector<Ranks>& groups,
                      const std::string& capacity_names) {
  return RefuseOverflows(op + kIsFallback, groups, capacity_names);
}

// A copy, or a fill with zeros if src == nullptr.
struct Copy {
  char* dst;
  const char* src;
  int64_t num_bytes;
};

// Does an item of work; `next` is the one that follows, in an exchange of more bytes than caches
// hold, and nullptr in others.
template <typename Item>
using Run = void (*)(const Item& item, const Item* next);

// Items of work, gathered into tasks of about kTaskBytes: one thread runs a small exchange alone.
template <typename Item>
class TaskList {
 public:
  void Add(Item item, int64_t num_bytes) {
    items_.push_back(std::move(item));
    all_bytes_ += num_bytes;
    open_bytes_ += num_bytes;
    if (open_bytes_ >= kTaskBytes) CloseTask();
  }

  WorkList Finish(Run<Item> run) && {
    if (open_bytes_ > 0) CloseTask();
    const auto num_tasks = static_cast<int64_t>(task_ends_.size());
    const bool is_large = all_bytes_ > kManyBytes;
    return {num_tasks,
            [run, is_large, items = std::move(items_), ends = std::move(task_ends_)](int64_t task) {
              const size_t begin = task == 0 ? 0 : ends[task - 1], end = ends[task];
              for (size_t i = begin; i < end; ++i) {
                run(items[i], is_large ? &items[std::min(i + 1, end - 1)] : nullptr);
              }
            }};
  }

 private:
  void CloseTask() {
    task_ends_.push_back(items_.size());
    open_bytes_ = 0;
  }

  std::vector<Item> items_;
  std::vector<size_t> task_ends_;
  int64_t open_bytes_ = 0, all_bytes_ = 0;
};

void AddCopy(TaskList<Copy>* tasks, char* dst, const char* src, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += kTaskBytes) {
    const int64_t n = std::min(kTaskBytes, num_bytes - at);
    tasks->Add({dst + at, src ? src + at : nullptr, n}, n);
  }
}

void RunCopy(const Copy& copy, const Copy* next) {
  if (copy.src == nullptr) {
    std::memset(copy.dst, 0, copy.num_bytes);
  } else if (next) {
    StreamCopy(copy.dst, copy.src, copy.num_bytes, next->src ? next->src : copy.src);
  } else {
    std::memcpy(copy.dst, copy.src, copy.num_bytes);
  }
}

// Rows of one array on one rank that all have the same sources.
struct RowsSum {
  SumTypes types;
  char* out;
  int64_t num_elements;
  std::vector<const char*> sources;
  std::vector<RowWeight> weights = {};  // of the sources, if there are any
};

void RunSum(const RowsSum& sum, const RowsSum* /*next*/) {
  if (sum.weights.empty()) {
    SumRows(sum.types, sum.sources, sum.num_elements, sum.out);
  } else {
    SumWeightedRows(sum.types.in, sum.sources, sum.weights, sum.num_elements, sum.out);
  }
}

// The rows of one owner between two neighbouring boundaries of its segments, and the segments that
// cover them, in (slot, replica) order.
struct Interval {
  int64_t begin;
  int64_t end;
  std::vector<const Segment*> cover;
};

std::vector<Interval> CutIntervals(const std::vector<const Segment*>& segments, int64_t num_rows) {
  std::vector<int64_t> cuts = {0};
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment *s = segments[i], *last = i > 0 ? segments[i - 1] : nullptr;
    if (last && s->src_row == last->src_row && s->num_rows == last->num_rows) continue;
    cuts.push_back(s->src_row);
    cuts.push_back(s->src_row + s->num_rows);
  }
  cuts.push_back(num_rows);
  if (!std::is_sorted(cuts.begin(), cuts.end())) std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<Interval> intervals;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) intervals.push_back({cuts[i], cuts[i + 1], {}});
  for (const Segment* s : segments) {
    auto i = std::lower_bound(cuts.begin(), cuts.end(), s->src_row) - cuts.begin();
    for (; intervals[i].begin < s->src_row + s->num_rows; ++i) {
      intervals[i].cover.push_back(s);
      if (static_cast<size_t>(i) + 1 == intervals.size()) break;
    }
  }
  return intervals;
}

// Brings those of one rank together, in the order in which the ranks come first. The first replica
// follows the second if both are there, as XLA adds them: only so the bits are equal.
void GroupByRank(int64_t num_replicas, std::vector<const Segment*>* cover) {
  if (cover->size() > 1) {
    const Segment *&first = (*cover)[0], *&second = (*cover)[1];
    const bool are_first =
        first->replica % num_replicas == 0 && second->replica - first->replica == 1;
    if (are_first && first->dst_rank == second->dst_rank) std::swap(first, second);
  }
  for (auto part = cover->begin(); part != cover->end();) {
    const auto is_same = [rank = (*part)->dst_rank](const Segment* s) {
      return s->dst_rank == rank;
    };
    part = std::stable_partition(part, cover->end(), is_same);
  }
}

double WeightOf(const OperandGroup& group, const Segment& s) {
  return group.weight_type == DataType::kF64 ? static_cast<const double*>(group.weights)[s.replica]
                                             : static_cast<const float*>(group.weights)[s.replica];
}

// Rows of one array that other processes read, as ranges of bytes: begin -> end.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;

// A row that goes to several ranks is copied once.
void AddStaging(const RowArray& array, Ranges ranges, std::vector<StagedCopy>* staging) {
  std::sort(ranges.begin(), ranges.end());
  int64_t done = 0;
  for (const auto& [begin, end] : ranges) {
    for (int64_t at = std::max(begin, done); at < end; at += kTaskBytes) {
      staging->push_back({array.shared + at, array.data + at, std::min(kTaskBytes, end - at)});
    }
    done = std::max(done, end);
  }
}

Status PlanDispatchGroup(const std::string& op, const Ranks& ranks,
                         const std::string& capacity_name, TaskList<Copy>* tasks,
                         std::vector<StagedCopy>* staging) {
  std::vector<Segment> segments;
  std::vector<std::vector<Segment>> received;
  Status status = ReadAndCheck(op, ranks, capacity_name, &segments, &received);
  if (!status.ok()) return status;
  for (size_t a = 0; a < ranks[0]->tokens.size(); ++a) {
    for (size_t dst = 0; dst < ranks.size(); ++dst) {
      const RowArray& out = ranks[dst]->buffers[a];
      if (!out.is_here()) continue;
      int64_t row = 0;
      const auto zero_until = [&](int64_t end) {
        AddCopy(tasks, out.data + row * out.row_bytes, nullptr, (end - row) * out.row_bytes);
      };
      for (const Segment& s : received[dst]) {
        zero_until(s.dst_row);
        AddCopy(tasks, out.data + s.dst_row * out.row_bytes,
                ranks[s.src_rank]->tokens[a].source() + s.src_row * out.row_bytes,
                s.num_rows * out.row_bytes);
        row = s.dst_row + s.num_rows;
      }
      zero_until(out.num_rows);
    }
    for (size_t src = 0; src < ranks.size(); ++src) {
      const RowArray& in = ranks[src]->tokens[a];
      if (!in.is_here() || in.shared == nullptr) continue;
      Ranges ranges;
      for (const Segment& s : segments) {
        if (s.src_rank != static_cast<int32_t>(src) || ranks[s.dst_rank]->buffers[a].is_here()) {
          continue;
        }
        ranges.push_back({s.src_row * in.row_bytes, (s.src_row + s.num_rows) * in.row_bytes});
      }
      AddStaging(in, std::move(ranges), staging);
    }
  }
  return Status::Ok();
}

Status PlanCombineGroup(const std::string& op, const Ranks& ranks, const std::string& capacity_name,
                        TaskList<RowsSum>* tasks, std::vector<StagedCopy>* staging) {
  std::vector<Segment> segments;
  std::vector<std::vector<Segment>> received;
  Status status = CheckTypes(op, ranks);
  if (status.ok()) status = ReadAndCheck(op, ranks, capacity_name, &segments, &received);
  if (!status.ok()) return status;

  std::vector<std::vector<const Segment*>> sent(ranks.size());
  for (const Segment& s : segments) sent[s.src_rank].push_back(&s);
  for (size_t src = 0; src < ranks.size(); ++src) {
    for (size_t a = 0; a < ranks[src]->tokens.size(); ++a) {
      const RowArray& out = ranks[src]->tokens[a];
      const SumTypes types = ranks[src]->types[a];
      if (out.row_bytes == 0 || !out.is_here()) continue;
      const int64_t elements_per_row = out.row_bytes / ElementBytes(types.out);
      const int64_t in_row_bytes = elements_per_row * ElementBytes(types.in);
      const int64_t rows_per_task = std::max<int64_t>(1, kTaskBytes / out.row_bytes);
      for (Interval& interval : CutIntervals(sent[src], out.num_rows)) {
        if (ranks[src]->weights) GroupByRank(ranks[src]->num_replicas, &interval.cover);
        for (int64_t row = interval.begin; row < interval.end; row += rows_per_task) {
          const int64_t n = std::min(rows_per_task, interval.end - row);
          int32_t last_rank = -1;
          RowsSum sum{types, out.data + row * out.row_bytes, n * elements_per_row, {}};
          for (const Segment* s : interval.cover) {
            sum.sources.push_back(ranks[s->dst_rank]->buffers[a].source() +
                                  (s->dst_row + row - s->src_row) * in_row_bytes);
            if (!ranks[src]->weights) continue;
            if (last_rank == s->dst_rank) sum.weights.back().ends_part = false;
            sum.weights.push_back({WeightOf(*ranks[src], *s), true});
            last_rank = s->dst_rank;
          }
          tasks->Add(std::move(sum), n * out.row_bytes);
        }
      }
    }
  }
  for (size_t dst = 0; dst < ranks.size(); ++dst) {
    for (size_t a = 0; a < ranks[dst]->buffers.size(); ++a) {
      const RowArray& in = ranks[dst]->buffers[a];
      if (!in.is_here() || in.shared == nullptr) continue;
      Ranges ranges;
      for (const Segment& s : received[dst]) {
        if (ranks[s.src_rank]->tokens[a].is_here()) continue;
        ranges.push_back({s.dst_row * in.row_bytes, (s.dst_row + s.num_rows) * in.row_bytes});
      }
      AddStaging(in, std::move(ranges), staging);
    }
  }
  return Status::Ok();
}

// Plans all groups with `plan_group` before anything runs: one invalid group stops the others too.
template <typename Item>
Status PlanGroups(const std::string& op,
                  const std::vector<std::unique_ptr<Contribution>>& contributions,
                  const MessageNames& names,
                  Status (*plan_group)(const std::string&, const Ranks&, const std::string&,
                                       TaskList<Item>*, std::vector<StagedCopy>*),
                  Run<Item> run, WorkList* work) {
  std::vector<Ranks> groups;
  Status status = SplitGroups(op, contributions, &groups);
  for (size_t p = 0; p < groups.size() && status.ok(); ++p) {
    status = IsFallback(groups[p]) ? RefuseFallback(op, groups, names.capacity_names)
                                   : CheckFingerprints(op, groups[p], names.processes);
  }
  TaskList<Item> tasks;
  std::vector<StagedCopy> staging;
  for (size_t p = 0; p < groups.size() && status.ok(); ++p) {
    status = plan_group(GroupName(op, p, groups.size()), groups[p],
                        CapacityName(names.capacity_names, p), &tasks, &staging);
    if (!status.ok() && !DescribeOverflow(groups[p], "").empty()) {
      const bool are_experts = AreExperts(names.capacity_names);
      status =
          RefuseOverflows((are_experts ? OfRoute(op) : op) + ":", groups, names.capacity_names);
    }
  }
  if (status.ok()) {
    *work = std::move(tasks).Finish(run);
    work->staging = std::move(staging);
  }
  return status;
}

}  // namespace

Status PlanDispatch(const std::string& op,
                    const std::vector<std::unique_ptr<Contribution>>& contributions, WorkList* work,
                    const MessageNames& names) {
  return PlanGroups(op, contributions, names, PlanDispatchGroup, RunCopy, work);
}

Status PlanCombine(const std::string& op,
                   const std::vector<std::unique_ptr<Contribution>>& contributions, WorkList* work,
                   const MessageNames& names) {
  return PlanGroups(op, contributions, names, PlanCombineGroup, RunSum, work);
}

}  // namespace cpd
