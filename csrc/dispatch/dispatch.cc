// Copy planning: from what the ranks of one dispatch or combine bring to the copies that make it.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace cpd {
namespace {

// A task is about this many bytes: large enough to hide its bookkeeping, small enough to share.
constexpr int64_t kTaskBytes = 512 << 10;

// More rows than any array has; sums of a few of them stay far from 2^63.
constexpr int64_t kManyRows = int64_t{1} << 48;

// What each rank brings of one part.
using Ranks = std::vector<const DispatchPart*>;

// One replica of one shard, with everything that the rest needs of it.
struct Segment {
  int32_t src_rank;
  int32_t dst_rank;
  int64_t src_row;
  int64_t dst_row;
  int64_t num_rows;
};

template <typename... Parts>
Status Invalid(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return Status::Invalid(message.str());
}

// Every rank brings arrays and metadata of the same make.
Status CheckShapes(const std::string& op, const Ranks& ranks) {
  const DispatchPart& first = *ranks[0];
  for (size_t r = 1; r < ranks.size(); ++r) {
    const DispatchPart& other = *ranks[r];
    if (other.num_slots != first.num_slots || other.num_replicas != first.num_replicas) {
      return Invalid(op, ": rank ", r, " brings metadata of ", other.num_slots, " slots x ",
                     other.num_replicas, " replicas, rank 0 of ", first.num_slots, " x ",
                     first.num_replicas, ". All ranks need slices of one Metadata.");
    }
    if (other.tokens.size() != first.tokens.size()) {
      return Invalid(op, ": rank ", r, " brings ", other.tokens.size(), " arrays, rank 0 ",
                     first.tokens.size(), ". All ranks must run the same program.");
    }
    for (size_t a = 0; a < first.tokens.size(); ++a) {
      if (other.tokens[a].row_bytes != first.tokens[a].row_bytes) {
        return Invalid(op, ": array ", a, " has rows of ", other.tokens[a].row_bytes,
                       " bytes on rank ", r, " and of ", first.tokens[a].row_bytes,
                       " on rank 0. All ranks must run the same program.");
      }
    }
  }
  return Status::Ok();
}

// Reads all segments and checks the ranges that could touch memory outside an array.
Status ReadSegments(const std::string& op, const Ranks& ranks, std::vector<Segment>* segments) {
  const auto num_ranks = static_cast<int32_t>(ranks.size());
  for (int32_t src = 0; src < num_ranks; ++src) {
    const DispatchPart& rank = *ranks[src];
    int64_t next_row = 0;
    for (int64_t slot = 0; slot < rank.num_slots; ++slot) {
      const int64_t num_rows = rank.seq_len[slot];
      const int64_t src_row = rank.src_offset ? rank.src_offset[slot] : next_row;
      if (num_rows < 0 || src_row < 0) {
        return Invalid(op, ": rank ", src, " slot ", slot, " has seq_len ", num_rows,
                       " and src_offset ", src_row,
                       "; both must be at least 0. See Metadata.validate().");
      }
      // At most 2^49, and as far out as anything longer.
      next_row = std::min(src_row, kManyRows) + std::min(num_rows, kManyRows);
      if (num_rows == 0) continue;
      for (int64_t replica = 0; replica < rank.num_replicas; ++replica) {
        const int64_t dst = rank.dst_rank[slot * rank.num_replicas + replica];
        if (dst == -1) continue;
        if (dst < -1 || dst >= num_ranks) {
          return Invalid(op, ": rank ", src, " slot ", slot, " replica ", replica, " has dst_rank ",
                         dst, "; it must be in [-1, ", num_ranks, "). See Metadata.validate().");
        }
        for (const RowArray& array : rank.tokens) {
          if (num_rows > array.num_rows || src_row > array.num_rows - num_rows) {
            return Invalid(op, ": rank ", src, " slot ", slot, " names ", num_rows,
                           " rows from row ", src_row, " but the rank has ", array.num_rows,
                           " tokens. Pass an array with at least that many rows.");
          }
        }
        const int64_t dst_row = rank.dst_offset[slot * rank.num_replicas + replica];
        if (dst_row < 0 || dst_row > kManyRows) {
          return Invalid(op, ": rank ", src, " slot ", slot, " replica ", replica,
                         " has dst_offset ", dst_row,
                         "; it must be in [0, 2^48]. See "
                         "Metadata.validate().");
        }
        segments->push_back({src, static_cast<int32_t>(dst), src_row, dst_row, num_rows});
      }
    }
  }
  return Status::Ok();
}

// The receive buffers are large enough, for what the counts announce and for what the slots name.
Status CheckCapacity(const std::string& op, const Ranks& ranks,
                     const std::vector<Segment>& segments) {
  const size_t num_ranks = ranks.size();
  std::vector<int64_t> need(num_ranks);
  for (size_t dst = 0; dst < num_ranks; ++dst) need[dst] = ranks[dst]->num_recv[num_ranks];
  for (const Segment& s : segments) {
    need[s.dst_rank] = std::max(need[s.dst_rank], s.dst_row + s.num_rows);
  }
  for (size_t dst = 0; dst < num_ranks; ++dst) {
    for (const RowArray& array : ranks[dst]->buffers) {
      if (need[dst] > array.num_rows) {
        return Invalid(op, ": rank ", dst, " would receive ", need[dst], " tokens but capacity is ",
                       array.num_rows, ". Pass capacity>=", need[dst],
                       ", or a plan that sends less to one rank.");
      }
    }
  }
  return Status::Ok();
}

// What each pair of ranks announces is what its slots move; less means that slots were cut off.
Status CheckCounts(const std::string& op, const Ranks& ranks,
                   const std::vector<Segment>& segments) {
  const size_t num_ranks = ranks.size();
  std::vector<int64_t> moved(num_ranks * num_ranks);
  for (const Segment& s : segments) moved[s.dst_rank * num_ranks + s.src_rank] += s.num_rows;
  for (size_t dst = 0; dst < num_ranks; ++dst) {
    for (size_t src = 0; src < num_ranks; ++src) {
      const int64_t announced = ranks[dst]->num_recv[src];
      if (announced == moved[dst * num_ranks + src]) continue;
      return Invalid(op, ": rank ", dst, " expects ", announced, " tokens from rank ", src,
                     " (num_recv_tokens) but rank ", src, "'s slots send it ",
                     moved[dst * num_ranks + src],
                     ". If the plan was made under jit, a static bound (max_recv_seqs, "
                     "max_kv_destinations) was too small for it: raise it. Else see "
                     "Metadata.validate().");
    }
  }
  return Status::Ok();
}

// Groups the segments by destination in row order, and refuses rows written twice.
Status SortByDestination(const std::string& op, size_t num_ranks,
                         const std::vector<Segment>& segments,
                         std::vector<std::vector<Segment>>* received) {
  received->resize(num_ranks);
  for (const Segment& s : segments) (*received)[s.dst_rank].push_back(s);
  for (std::vector<Segment>& list : *received) {
    const auto before = [](const Segment& a, const Segment& b) { return a.dst_row < b.dst_row; };
    if (!std::is_sorted(list.begin(), list.end(), before)) {
      std::sort(list.begin(), list.end(), before);
    }
    for (size_t i = 1; i < list.size(); ++i) {
      if (list[i - 1].dst_row + list[i - 1].num_rows <= list[i].dst_row) continue;
      return Invalid(
          op, ": rows ", list[i].dst_row, "..",
          std::min(list[i - 1].dst_row + list[i - 1].num_rows, list[i].dst_row + list[i].num_rows),
          " of rank ", list[i].dst_rank, " are written by rank ", list[i - 1].src_rank,
          " and by rank ", list[i].src_rank,
          ". Destination ranges must not overlap; see Metadata.validate().");
    }
  }
  return Status::Ok();
}

Status Check(const std::string& op, const Ranks& ranks, std::vector<Segment>* segments,
             std::vector<std::vector<Segment>>* received) {
  Status status = CheckShapes(op, ranks);
  if (status.ok()) status = ReadSegments(op, ranks, segments);
  if (status.ok()) status = CheckCapacity(op, ranks, *segments);
  if (status.ok()) status = CheckCounts(op, ranks, *segments);
  if (status.ok()) status = SortByDestination(op, ranks.size(), *segments, received);
  return status;
}

Status CheckTypes(const std::string& op, const Ranks& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t a = 0; a < ranks[r]->types.size(); ++a) {
      if (SumIsSupported(ranks[r]->types[a])) continue;
      return Invalid(op, ": array ", a, " on rank ", r,
                     " has a dtype that cannot be summed. Cast it first.");
    }
  }
  return Status::Ok();
}

// The parts of all ranks, part by part; every rank brings equally many.
Status SplitParts(const std::string& op,
                  const std::vector<std::unique_ptr<Contribution>>& contributions,
                  std::vector<Ranks>* parts) {
  for (size_t r = 0; r < contributions.size(); ++r) {
    const auto* rank = static_cast<const DispatchContribution*>(contributions[r].get());
    if (r == 0) parts->resize(rank->parts.size());
    if (rank->parts.size() != parts->size()) {
      return Invalid(op, ": rank ", r, " brings ", rank->parts.size(), " plans, rank 0 ",
                     parts->size(), ". All ranks must run the same program.");
    }
    for (size_t p = 0; p < parts->size(); ++p) (*parts)[p].push_back(&rank->parts[p]);
  }
  return Status::Ok();
}

// Begins the messages about one part: its number where there are several.
std::string PartName(const std::string& op, size_t part, size_t num_parts) {
  if (num_parts == 1) return op;
  return op + ", plan " + std::to_string(part) + " of 0.." + std::to_string(num_parts - 1);
}

// A copy, or with src == nullptr a fill with zeros.
struct Copy {
  char* dst;
  const char* src;
  int64_t num_bytes;
};

// Pieces of work gathered into tasks of about kTaskBytes: one thread makes a small exchange alone.
template <typename Piece>
class TaskList {
 public:
  void Add(Piece piece, int64_t num_bytes) {
    pieces_.push_back(std::move(piece));
    open_bytes_ += num_bytes;
    if (open_bytes_ >= kTaskBytes) CloseTask();
  }

  WorkList Finish(void (*run)(const Piece&)) && {
    if (open_bytes_ > 0) CloseTask();
    const auto num_tasks = static_cast<int64_t>(task_ends_.size());
    return {num_tasks,
            [run, pieces = std::move(pieces_), ends = std::move(task_ends_)](int64_t task) {
              for (size_t i = task == 0 ? 0 : ends[task - 1]; i < ends[task]; ++i) run(pieces[i]);
            }};
  }

 private:
  void CloseTask() {
    task_ends_.push_back(pieces_.size());
    open_bytes_ = 0;
  }

  std::vector<Piece> pieces_;
  std::vector<size_t> task_ends_;
  int64_t open_bytes_ = 0;
};

void AddCopy(TaskList<Copy>* tasks, char* dst, const char* src, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += kTaskBytes) {
    const int64_t n = std::min(kTaskBytes, num_bytes - at);
    tasks->Add({dst + at, src ? src + at : nullptr, n}, n);
  }
}

void RunCopy(const Copy& copy) {
  if (copy.src) {
    std::memcpy(copy.dst, copy.src, copy.num_bytes);
  } else {
    std::memset(copy.dst, 0, copy.num_bytes);
  }
}

// Rows of one array on one rank that have the same sources throughout.
struct SumPiece {
  SumTypes types;
  char* out;
  int64_t num_elements;
  std::vector<const char*> sources;
};

void RunSum(const SumPiece& piece) {
  SumRows(piece.types, piece.sources, piece.num_elements, piece.out);
}

// The rows of one owner between two neighbouring boundaries of its segments, and who covers them
// in (slot, replica) order.
struct Interval {
  int64_t begin;
  int64_t end;
  std::vector<const Segment*> cover;
};

std::vector<Interval> CutIntervals(const std::vector<const Segment*>& segments, int64_t num_rows) {
  std::vector<int64_t> cuts = {0, num_rows};
  for (const Segment* s : segments) {
    cuts.push_back(s->src_row);
    cuts.push_back(s->src_row + s->num_rows);
  }
  std::sort(cuts.begin(), cuts.end());
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

Status PlanDispatchPart(const std::string& op, const Ranks& ranks, TaskList<Copy>* tasks) {
  std::vector<Segment> segments;
  std::vector<std::vector<Segment>> received;
  if (Status status = Check(op, ranks, &segments, &received); !status.ok()) return status;
  for (size_t a = 0; a < ranks[0]->tokens.size(); ++a) {
    for (size_t dst = 0; dst < ranks.size(); ++dst) {
      const RowArray& out = ranks[dst]->buffers[a];
      int64_t row = 0;
      const auto zero_until = [&](int64_t end) {
        AddCopy(tasks, out.data + row * out.row_bytes, nullptr, (end - row) * out.row_bytes);
      };
      for (const Segment& s : received[dst]) {
        zero_until(s.dst_row);
        AddCopy(tasks, out.data + s.dst_row * out.row_bytes,
                ranks[s.src_rank]->tokens[a].data + s.src_row * out.row_bytes,
                s.num_rows * out.row_bytes);
        row = s.dst_row + s.num_rows;
      }
      zero_until(out.num_rows);
    }
  }
  return Status::Ok();
}

Status PlanCombinePart(const std::string& op, const Ranks& ranks, TaskList<SumPiece>* tasks) {
  std::vector<Segment> segments;
  std::vector<std::vector<Segment>> received;
  if (Status status = CheckTypes(op, ranks); !status.ok()) return status;
  if (Status status = Check(op, ranks, &segments, &received); !status.ok()) return status;

  std::vector<std::vector<const Segment*>> sent(ranks.size());
  for (const Segment& s : segments) sent[s.src_rank].push_back(&s);
  for (size_t src = 0; src < ranks.size(); ++src) {
    for (size_t a = 0; a < ranks[src]->tokens.size(); ++a) {
      const RowArray& out = ranks[src]->tokens[a];
      const SumTypes types = ranks[src]->types[a];
      if (out.row_bytes == 0) continue;
      const int64_t elements_per_row = out.row_bytes / ElementBytes(types.out);
      const int64_t in_row_bytes = elements_per_row * ElementBytes(types.in);
      const int64_t rows_per_task = std::max<int64_t>(1, kTaskBytes / out.row_bytes);
      for (const Interval& interval : CutIntervals(sent[src], out.num_rows)) {
        for (int64_t row = interval.begin; row < interval.end; row += rows_per_task) {
          const int64_t n = std::min(rows_per_task, interval.end - row);
          SumPiece piece{types, out.data + row * out.row_bytes, n * elements_per_row, {}};
          for (const Segment* s : interval.cover) {
            piece.sources.push_back(ranks[s->dst_rank]->buffers[a].data +
                                    (s->dst_row + row - s->src_row) * in_row_bytes);
          }
          tasks->Add(std::move(piece), n * out.row_bytes);
        }
      }
    }
  }
  return Status::Ok();
}

// Plans all parts with `plan_part` before anything runs, so that a bad one stops the others too.
template <typename Piece>
Status PlanParts(const std::string& op,
                 const std::vector<std::unique_ptr<Contribution>>& contributions,
                 Status (*plan_part)(const std::string&, const Ranks&, TaskList<Piece>*),
                 void (*run)(const Piece&), WorkList* work) {
  std::vector<Ranks> parts;
  Status status = SplitParts(op, contributions, &parts);
  TaskList<Piece> tasks;
  for (size_t p = 0; p < parts.size() && status.ok(); ++p) {
    status = plan_part(PartName(op, p, parts.size()), parts[p], &tasks);
  }
  if (status.ok()) *work = std::move(tasks).Finish(run);
  return status;
}

}  // namespace

int64_t IntArray::operator[](int64_t i) const {
  switch (type) {
    case IntType::kI32:
      return static_cast<const int32_t*>(data)[i];
    case IntType::kU32:
      return static_cast<const uint32_t*>(data)[i];
    case IntType::kI64:
    case IntType::kU64:
      return static_cast<const int64_t*>(data)[i];
  }
  return -1;
}

IntArray IntArray::From(int64_t i) const {
  const int64_t bytes = type == IntType::kI32 || type == IntType::kU32 ? 4 : 8;
  return {static_cast<const char*>(data) + i * bytes, type};
}

Status PlanDispatch(const std::string& op,
                    const std::vector<std::unique_ptr<Contribution>>& contributions,
                    WorkList* work) {
  return PlanParts(op, contributions, PlanDispatchPart, RunCopy, work);
}

Status PlanCombine(const std::string& op,
                   const std::vector<std::unique_ptr<Contribution>>& contributions,
                   WorkList* work) {
  return PlanParts(op, contributions, PlanCombinePart, RunSum, work);
}

}  // namespace cpd
