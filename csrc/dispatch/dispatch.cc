// Copy planning: turns the contributions of the ranks of one dispatch or combine into copies.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

namespace cpd {
namespace {

// ---- The metadata of all ranks, as checked segments; invalid metadata is rejected before any
// copy.

// One operand group, as each rank contributes it.
using Ranks = std::vector<const OperandGroup*>;

// One replica of one shard, with everything that planning needs to know about it.
struct Segment {
  int32_t src_rank;
  int32_t dst_rank;
  int64_t src_row;
  int64_t dst_row;
  int64_t num_rows;
  int64_t replica;  // its index in [S, C]
};

// Every rank contributes arrays and metadata of the same structure.
Status CheckShapes(const std::string& op, const Ranks& ranks) {
  const OperandGroup& first = *ranks[0];
  for (size_t r = 1; r < ranks.size(); ++r) {
    const OperandGroup& other = *ranks[r];
    if (other.num_slots != first.num_slots || other.num_replicas != first.num_replicas) {
      return Status::Invalid(op, ": rank ", r, " has metadata of ", other.num_slots, " slots x ",
                             other.num_replicas, " replicas but rank 0 of ", first.num_slots, " x ",
                             first.num_replicas, ". All ranks need slices of one Metadata.");
    }
    if (other.tokens.size() != first.tokens.size()) {
      return Status::Invalid(op, ": rank ", r, " has ", other.tokens.size(),
                             " arrays but rank 0 has ", first.tokens.size(),
                             ". All ranks must run the same program.");
    }
    for (size_t a = 0; a < first.tokens.size(); ++a) {
      if (other.tokens[a].row_bytes != first.tokens[a].row_bytes) {
        return Status::Invalid(op, ": array ", a, " has rows of ", other.tokens[a].row_bytes,
                               " bytes on rank ", r, " and of ", first.tokens[a].row_bytes,
                               " on rank 0. All ranks must run the same program.");
      }
    }
  }
  return Status::Ok();
}

// Reads all segments and checks every range that could reach outside an array.
Status ReadSegments(const std::string& op, const Ranks& ranks, const std::string& capacity_name,
                    std::vector<Segment>* segments) {
  const auto num_ranks = static_cast<int32_t>(ranks.size());
  for (int32_t src = 0; src < num_ranks; ++src) {
    const OperandGroup& rank = *ranks[src];
    int64_t next_row = 0;
    for (int64_t slot = 0; slot < rank.num_slots; ++slot) {
      const int64_t num_rows = rank.seq_len[slot];
      const int64_t src_row = rank.src_offset ? rank.src_offset[slot] : next_row;
      if (num_rows < 0 || src_row < 0) {
        return Status::Invalid(op, ": rank ", src, " slot ", slot, BadLength(num_rows, src_row));
      }
      // Clamped to 2^49, which is out of range like anything larger.
      next_row = std::min(src_row, kMostRows) + std::min(num_rows, kMostRows);
      if (num_rows == 0) continue;
      for (int64_t replica = 0; replica < rank.num_replicas; ++replica) {
        const int64_t index = slot * rank.num_replicas + replica;
        const int64_t dst = rank.dst_rank[index];
        if (dst == -1) continue;
        if ((dst < -1 || dst >= num_ranks) && AreExperts(capacity_name)) {
          return Status::Invalid(
              OfRoute(op), ": ",
              NoExpert(capacity_name, src, slot, replica, dst < 0 ? dst : dst - num_ranks));
        }
        if (dst < -1 || dst >= num_ranks) {
          return Status::Invalid(op, ": rank ", src, " slot ", slot, " replica ", replica,
                                 BadTarget(dst, num_ranks));
        }
        for (const RowArray& array : rank.tokens) {
          if (num_rows > array.num_rows || src_row > array.num_rows - num_rows) {
            return Status::Invalid(op, ": rank ", src, " slot ", slot, " names ", num_rows,
                                   " rows from row ", src_row, " but the rank has ", array.num_rows,
                                   " tokens. Pass an array with at least that many rows.");
          }
        }
        const int64_t dst_row = rank.dst_offset[index];
        if (dst_row < 0 || dst_row > kMostRows) {
          return Status::Invalid(op, ": rank ", src, " slot ", slot, " replica ", replica,
                                 " has dst_offset ", dst_row,
                                 "; it must be in [0, 2^48]. See Metadata.validate().");
        }
        segments->push_back({src, static_cast<int32_t>(dst), src_row, dst_row, num_rows, index});
      }
    }
  }
  return Status::Ok();
}

std::vector<int64_t> AnnouncedNeeds(const Ranks& ranks) {
  std::vector<int64_t> need;
  for (const OperandGroup* rank : ranks) need.push_back(rank->num_recv_tokens[ranks.size()]);
  return need;
}

// The largest need that exceeds a rank's receive buffers, in words; empty if all fit.
std::string Overflow(const Ranks& ranks, const std::vector<int64_t>& need,
                     const std::string& capacity_name) {
  size_t most = 0;
  int64_t capacity = -1;  // of the rank with the largest need that exceeds it
  for (size_t dst = 0; dst < ranks.size(); ++dst) {
    for (const RowArray& array : ranks[dst]->buffers) {
      if (need[dst] <= array.num_rows || (capacity >= 0 && need[dst] <= need[most])) continue;
      most = dst;
      capacity = array.num_rows;
    }
  }
  if (capacity < 0) return "";
  if (AreExperts(capacity_name)) return TooManyRows(most, need[most], capacity_name);
  std::ostringstream text;
  text << "rank " << most << " would receive " << need[most] << " tokens but " << capacity_name
       << " is " << capacity << ". Pass " << capacity_name << ">=" << need[most]
       << ", or a plan that sends less to one rank.";
  return text.str();
}

// Checks that the receive buffers are large enough for the announced counts and for the slots.
Status CheckCapacity(const std::string& op, const Ranks& ranks, const std::string& capacity_name,
                     const std::vector<Segment>& segments) {
  std::vector<int64_t> need = AnnouncedNeeds(ranks);
  for (const Segment& s : segments) {
    need[s.dst_rank] = std::max(need[s.dst_rank], s.dst_row + s.num_rows);
  }
  const std::string overflow = Overflow(ranks, need, capacity_name);
  return overflow.empty() ? Status::Ok() : Status::Invalid(op, ": ", overflow);
}

// Checks that each pair of ranks announces what its slots move; less means that slots were cut off.
Status CheckCounts(const std::string& op, const Ranks& ranks,
                   const std::vector<Segment>& segments) {
  const size_t num_ranks = ranks.size();
  std::vector<int64_t> moved(num_ranks * num_ranks);
  for (const Segment& s : segments) moved[s.dst_rank * num_ranks + s.src_rank] += s.num_rows;
  for (size_t dst = 0; dst < num_ranks; ++dst) {
    for (size_t src = 0; src < num_ranks; ++src) {
      const int64_t announced = ranks[dst]->num_recv_tokens[src];
      if (announced == moved[dst * num_ranks + src]) continue;
      return Status::Invalid(op, ": rank ", dst,
                             OtherCounts(src, announced, moved[dst * num_ranks + src]));
    }
  }
  return Status::Ok();
}

// Sorts the segments of one destination by their first row, which is below `num_rows`.
void SortByRow(int64_t num_rows, std::vector<Segment>* segments) {
  const auto before = [](const Segment& a, const Segment& b) { return a.dst_row < b.dst_row; };
  if (std::is_sorted(segments->begin(), segments->end(), before)) return;
  // Single rows, such as tokens for experts, need no comparisons: each has a place of its own.
  constexpr int64_t kMostPlaces = 4;  // for each segment
  const auto size = static_cast<int64_t>(segments->size());
  if (size > INT32_MAX || num_rows > kMostPlaces * size) {
    std::sort(segments->begin(), segments->end(), before);
    return;
  }
  std::vector<int32_t> count(num_rows + 1);  // of segments that begin in an earlier row
  for (const Segment& s : *segments) ++count[s.dst_row + 1];
  std::partial_sum(count.begin(), count.end(), count.begin());
  std::vector<Segment> sorted(size);
  for (const Segment& s : *segments) sorted[count[s.dst_row]++] = s;
  *segments = std::move(sorted);
}

// Groups the segments by destination in row order; rejects rows that are written twice.
Status SortByDestination(const std::string& op, const Ranks& ranks,
                         const std::vector<Segment>& segments,
                         std::vector<std::vector<Segment>>* received) {
  std::vector<int64_t> sizes(ranks.size()), num_rows(ranks.size());
  for (const Segment& s : segments) {
    ++sizes[s.dst_rank];
    num_rows[s.dst_rank] = std::max(num_rows[s.dst_rank], s.dst_row + 1);
  }
  received->resize(ranks.size());
  for (size_t dst = 0; dst < ranks.size(); ++dst) (*received)[dst].reserve(sizes[dst]);
  for (const Segment& s : segments) (*received)[s.dst_rank].push_back(s);
  for (size_t dst = 0; dst < ranks.size(); ++dst) {
    std::vector<Segment>& list = (*received)[dst];
    SortByRow(num_rows[dst], &list);
    for (size_t i = 1; i < list.size(); ++i) {
      if (list[i - 1].dst_row + list[i - 1].num_rows <= list[i].dst_row) continue;
      return Status::Invalid(
          op, ": rows ", list[i].dst_row, "..",
          std::min(list[i - 1].dst_row + list[i - 1].num_rows, list[i].dst_row + list[i].num_rows),
          " of rank ", list[i].dst_rank, " are written by rank ", list[i - 1].src_rank,
          " and by rank ", list[i].src_rank,
          ". Destination ranges must not overlap; see Metadata.validate().");
    }
  }
  return Status::Ok();
}

// Checks that all ranks follow the plan of one batch, and that it is the batch each of them sees.
Status CheckFingerprints(const std::string& op, const Ranks& ranks,
                         const std::vector<int>* processes) {
  const auto name = [&](size_t rank) {
    const std::string text = "rank " + std::to_string(rank);
    return processes ? text + " of process " + std::to_string((*processes)[rank]) : text;
  };
  for (size_t r = 0; r < ranks.size(); ++r) {
    const IntArray &fingerprint = ranks[r]->fingerprint, &first = ranks[0]->fingerprint;
    if (static_cast<bool>(fingerprint) != static_cast<bool>(first)) {
      return Status::Invalid(
          op, ": ", name(r), " has ", fingerprint ? "" : "no ", "checksums of its batch but ",
          name(0), first ? " has them" : " has none", ". All ranks must run the same program.");
    }
    if (!fingerprint) continue;
    if (fingerprint[0] != first[0]) {
      return Status::Invalid(op, ": ", name(r), OtherPlan(fingerprint[0], first[0], name(0)));
    }
    for (int64_t part = 0; 2 + 2 * part < kFingerprintSize; ++part) {
      const int64_t expected = fingerprint[1 + 2 * part], seen = fingerprint[2 + 2 * part];
      if (expected != seen) return Status::Invalid(op, OtherBatch(part, expected, seen, name(r)));
    }
  }
  return Status::Ok();
}

// Whether the plan was not made: its batch does not fit.
bool IsFallback(const Ranks& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [](const OperandGroup* rank) {
    return rank->fingerprint && rank->fingerprint[1] == kNoRank;
  });
}

// The largest announced need that exceeds a rank's receive buffers, in words; empty if all fit.
// `capacity_name` is the argument that sets their size.
std::string DescribeOverflow(const Ranks& ranks, const std::string& capacity_name) {
  if (ranks[0]->buffers.empty()) return "";  // nothing moves
  return Overflow(ranks, AnnouncedNeeds(ranks), capacity_name);
}

// Reads the segments of one group and sorts those of each destination by row. Rejects inconsistent
// arrays, ranges outside of them, rows written twice and wrong counts.
Status ReadAndCheck(const std::string& op, const Ranks& ranks, const std::string& capacity_name,
                    std::vector<Segment>* segments, std::vector<std::vector<Segment>>* received) {
  Status status = CheckShapes(op, ranks);
  // Nothing moves, and no array bounds the slots.
  if (status.ok() && ranks[0]->tokens.empty()) return status;
  if (status.ok()) status = ReadSegments(op, ranks, capacity_name, segments);
  if (status.ok()) status = CheckCapacity(op, ranks, capacity_name, *segments);
  if (status.ok()) status = CheckCounts(op, ranks, *segments);
  if (status.ok()) status = SortByDestination(op, ranks, *segments, received);
  return status;
}

// Checks that every array has a type that can be summed.
Status CheckTypes(const std::string& op, const Ranks& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t a = 0; a < ranks[r]->types.size(); ++a) {
      const SumTypes types = ranks[r]->types[a];
      if (ranks[r]->weights ? WeightedSumIsSupported(types) : SumIsSupported(types)) continue;
      return Status::Invalid(op, ": array ", a, " on rank ", r,
                             " has a dtype that cannot be summed. Cast it first.");
    }
  }
  return Status::Ok();
}

// ---- Copies and sums.

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

// Stages the rows that ranks of other processes read: of the tokens for a dispatch, else of the
// buffers. A row that goes to several ranks is copied once.
void Stage(bool is_dispatch, const Ranks& ranks, const std::vector<Segment>& segments,
           std::vector<StagedCopy>* staging) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t a = 0; a < ranks[r]->tokens.size(); ++a) {
      const RowArray& in = is_dispatch ? ranks[r]->tokens[a] : ranks[r]->buffers[a];
      if (!in.is_here() || in.shared == nullptr) continue;
      std::vector<std::pair<int64_t, int64_t>> ranges;  // of bytes: begin, end
      for (const Segment& s : segments) {
        const OperandGroup& reader = *ranks[is_dispatch ? s.dst_rank : s.src_rank];
        const bool is_its = (is_dispatch ? s.src_rank : s.dst_rank) == static_cast<int32_t>(r);
        if (!is_its || reader.tokens[a].is_here()) continue;
        const int64_t row = is_dispatch ? s.src_row : s.dst_row;
        ranges.emplace_back(row * in.row_bytes, (row + s.num_rows) * in.row_bytes);
      }
      std::sort(ranges.begin(), ranges.end());
      int64_t done = 0;
      for (const auto& [begin, end] : ranges) {
        for (int64_t at = std::max(begin, done); at < end; at += kTaskBytes) {
          staging->push_back({in.shared + at, in.data + at, std::min(kTaskBytes, end - at)});
        }
        done = std::max(done, end);
      }
    }
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
  }
  Stage(/*is_dispatch=*/true, ranks, segments, staging);
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
  Stage(/*is_dispatch=*/false, ranks, segments, staging);
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
    // Any group of a fallback may exceed the numbers of ranges or pieces too, which only the host
    // knows.
    status = IsFallback(groups[p]) ? RefuseOverflows(op + kIsFallback, groups, names.capacity_names)
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
