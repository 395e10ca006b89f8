// Turns the metadata of all ranks into checked segments; rejects invalid metadata before any copy.
#include "dispatch/segments.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "dispatch/messages.h"

namespace cpd {
namespace {

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

}  // namespace

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

bool IsFallback(const Ranks& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [](const OperandGroup* rank) {
    return rank->fingerprint && rank->fingerprint[1] == kNoRank;
  });
}

std::string DescribeOverflow(const Ranks& ranks, const std::string& capacity_name) {
  if (ranks[0]->buffers.empty()) return "";  // nothing moves
  return Overflow(ranks, AnnouncedNeeds(ranks), capacity_name);
}

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

}  // namespace cpd
