// The rows that are summed to one row of their owner, and where ranks hold them.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/fabric.h"
#include "kernels/plan.h"

namespace cpd::kernels {

// Rows [begin, end) of the owner, as one rank holds them: row r is its row r + shift.
struct Source {
  int64_t begin, end;
  int64_t shift;
  // Half of its channel; for fetched rows, the start of the owner's; nullptr: the rows are in `in`
  // of this device.
  const char* half;
};

// If a strip of rows has more sources, they are looked up row by row, which is slow.
constexpr int kMaxSources = 256;
// If all rows of a block have at most so many, they are gathered once.
constexpr int kFewSources = 16;

struct SumScratch {
  int64_t scan[2 * kMaxThreads];
  Source sources[kMaxSources];
};

// A strip of an owner's rows, [begin, end), and their sources; maybe also those of rows nearby.
struct OwnedStrip {
  int64_t begin, end;
  const Source* gathered;
  int64_t num_gathered;

  // Whether all rows have the same single source, or none.
  CPD_DEVICE bool IsWhole() const {
    if (num_gathered > kMaxSources) return false;
    int num = 0;
    CPD_NO_UNROLL
    for (int64_t s = 0; s < num_gathered; ++s) {
      const Source& source = gathered[s];
      if (source.begin >= end || source.end <= begin) continue;
      if (++num > 1 || source.begin > begin || source.end < end) return false;
    }
    return true;
  }
};

// One row of an owner, or the first of several, and the gathered sources of its strip.
struct OwnedRow {
  int64_t row;
  const Source* gathered;
  int64_t num_gathered;
  char* to;

  CPD_DEVICE bool IsIn(const Source& source) const {
    return row >= source.begin && row < source.end;
  }
};

// The sources of an owner's rows, in the order of slots, then replicas.
template <typename Fabric>
struct Sources {
  const Rank& rank;
  const OperandGroup& group;

  // Read again where they are needed: registers are scarce.
  CPD_DEVICE const Slot& SlotAt(int64_t s) const { return rank.slots(group)[s]; }
  CPD_DEVICE int64_t Target(const IntArray& field, int64_t s, int64_t c) const {
    return rank.Field(group, field,
                      group.num_slots * group.num_replicas)[s * group.num_replicas + c];
  }

  // `num_fetched`: remote replicas of the slot before this one.
  CPD_DEVICE Source At(int64_t s, int64_t c, int64_t num_fetched) const {
    const Slot slot = SlotAt(s);
    const int64_t dst = Target(group.dst_rank, s, c);
    if (IsRemote<Fabric>(rank.call, dst)) {
      const int64_t first = rank.first_fetched(group)[s] + num_fetched * slot.num_rows;
      return {slot.src_row, slot.src_row + slot.num_rows, first - slot.src_row, rank.channel()};
    }
    const int64_t shift = Target(group.dst_offset, s, c) - slot.src_row;
    if (rank.IsHere(dst)) {
      return {slot.src_row, slot.src_row + slot.num_rows,
              shift + rank.IndexHere(dst) * group.capacity, nullptr};
    }
    return {slot.src_row, slot.src_row + slot.num_rows, shift,
            Half(rank.call, static_cast<int>(dst), rank.state()->epoch)};
  }

  // Calls visit(source) for each source in slots [first, last) that overlaps rows [begin, end).
  template <typename Visit>
  CPD_DEVICE void ForEach(int64_t first, int64_t last, int64_t begin, int64_t end,
                          Visit visit) const {
    for (int64_t s = first; s < last; ++s) {
      const Slot slot = SlotAt(s);
      if (slot.num_rows == 0 || slot.src_row >= end || slot.src_row + slot.num_rows <= begin) {
        continue;
      }
      int64_t num_fetched = 0;
      for (int64_t c = 0; c < group.num_replicas; ++c) {
        const int64_t dst = Target(group.dst_rank, s, c);
        if (dst < 0) continue;
        visit(At(s, c, num_fetched));
        num_fetched += IsRemote<Fabric>(rank.call, dst);
      }
    }
  }

  // Calls visit(source) for each source of one row, in order.
  template <typename Visit>
  CPD_DEVICE void ForEachOf(const OwnedRow& owned, Visit visit) const {
    if (owned.num_gathered > kMaxSources) {
      ForEach(0, group.num_slots, owned.row, owned.row + 1, visit);
      return;
    }
    CPD_NO_UNROLL
    for (int64_t s = 0; s < owned.num_gathered; ++s) {
      if (owned.IsIn(owned.gathered[s])) visit(owned.gathered[s]);
    }
  }

  CPD_DEVICE const char* RowOf(const Source& source, const Array& array, int64_t row) const {
    if (source.half == nullptr) return array.in + (row + source.shift) * array.in_row_bytes;
    const bool is_fetched = Fabric::kHasNetwork && source.half == rank.channel();
    return source.half + (is_fetched ? array.staged : array.data) +
           (row + source.shift) * array.in_row_bytes;
  }

  // Gathers the sources of rows [begin, end) in `scratch`; returns their number, even if they do
  // not fit. Threads may still read those gathered before when others begin.
  CPD_DEVICE int64_t Gather(const Block& block, int64_t begin, int64_t end,
                            SumScratch* scratch) const {
    const Share mine = ShareOf(block, group.num_slots);
    int64_t count = 0, total;
    ForEach(mine.begin, mine.end, begin, end, [&](const Source&) { ++count; });
    int64_t at = SumBefore(block, count, scratch->scan, &total);
    if (total <= kMaxSources) {
      ForEach(mine.begin, mine.end, begin, end,
              [&](const Source& source) { scratch->sources[at++] = source; });
    }
    block.Sync();
    return total;
  }
};

}  // namespace cpd::kernels
