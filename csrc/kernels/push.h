// Rows of `dispatch` go into the channels of the receiving ranks. Rows for ranks of the same device
// go into the result at once.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/plan.h"

namespace cpd::kernels {

struct PushScratch {
  int rank[kMulticast];
  int64_t row[kMulticast];  // the first one, of that rank
  char* to[kMulticast];
  int num;
};

// The last of `n` slots, by first strip, that begins at or before a strip. It contains the strip,
// since empty slots begin where the next one does.
CPD_DEVICE int64_t FindSlot(const Slot* slots, int64_t n, int64_t strip) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (slots[middle].first_strip <= strip ? low : high) = middle;
  }
  return low;
}

// Rows of a slot that a block moves at a time; whole shards if they are small.
struct Strip {
  const OperandGroup& group;
  int64_t slot;
  int64_t begin, num_rows;           // of the slot
  IntArray dst_rank, dst_offset;     // of all slots
  int64_t first_target, end_target;  // those of this slot
};

CPD_DEVICE int64_t NumStripsOf(const Rank& rank) {
  const State& state = *rank.state();
  return state.failed == kFine ? state.first_strip[rank.call.num_groups] : 0;
}

// Strip `i` of this rank, in the order in which it sends.
CPD_DEVICE Strip StripAt(const Rank& rank, int64_t i) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  const int64_t strip = rank.Turned(i, state.first_strip[call.num_groups]);
  int p = 0;
  while (strip >= state.first_strip[p + 1]) ++p;
  const OperandGroup& group = call.groups[p];
  const int64_t s = FindSlot(rank.slots(group), group.num_slots, strip);
  const Slot slot = rank.slots(group)[s];
  const int64_t begin = (strip - slot.first_strip) * group.rows_per_push;
  const int64_t rest = slot.num_rows - begin;
  const int64_t num_targets = group.num_slots * group.num_replicas;
  return Strip{group,
               s,
               begin,
               rest < group.rows_per_push ? rest : group.rows_per_push,
               rank.Field(group, group.dst_rank, num_targets),
               rank.Field(group, group.dst_offset, num_targets),
               s * group.num_replicas,
               (s + 1) * group.num_replicas};
}

// Calls visit(strip) for each strip of this block, with all its threads.
template <typename Visit>
CPD_DEVICE void ForEachStrip(const Block& block, const Rank& rank, Visit visit) {
  const int64_t num_strips = NumStripsOf(rank);
  for (int64_t i = block.index; i < num_strips; i += block.num_blocks) visit(StripAt(rank, i));
}

// Where row `row` of an array goes at rank `to`: into its result or its channel.
CPD_DEVICE char* PlaceOf(const Rank& rank, const OperandGroup& group, const Array& array, int to,
                         int64_t row) {
  const Call& call = rank.call;
  if (rank.IsHere(to)) {
    return array.out + (rank.IndexHere(to) * group.capacity + row) * array.out_row_bytes;
  }
  return Half(call, to, rank.state()->epoch) + array.data + row * array.in_row_bytes;
}

// Copies the rows of a strip for some of its replicas: each array is read once.
CPD_DEVICE void PushRows(const Block& block, const Rank& rank, const Strip& strip,
                         PushScratch* scratch) {
  const Call& call = rank.call;
  const OperandGroup& group = strip.group;
  const int64_t n = strip.num_rows;
  const int64_t src_row = rank.slots(group)[strip.slot].src_row + strip.begin;
  const uint64_t epoch = rank.state()->epoch;
  CPD_NO_UNROLL
  for (int i = 0; i < scratch->num; ++i) {
    const int to = scratch->rank[i];
    uint64_t* tags = Tags(call, to, epoch, group) + scratch->row[i];
    const uint64_t tag = rank.IsHere(to) ? TagInPlace(epoch) : TagOf(epoch, rank.rank());
    CPD_NO_UNROLL
    for (int64_t r = block.thread; r < n; r += block.num_threads) StoreRelaxed(&tags[r], tag);
  }
  for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
    const Array& array = call.arrays[a];
    for (int i = block.thread; i < scratch->num; i += block.num_threads) {
      scratch->to[i] = PlaceOf(rank, group, array, scratch->rank[i], scratch->row[i]);
    }
    block.Sync();
    Copy(block, rank.in(group, array) + src_row * array.in_row_bytes, scratch->to, scratch->num,
         n * array.in_row_bytes);
    block.Sync();
  }
}

// Copies a strip to all receiving ranks, except remote ones. Ends with a Sync if there are any.
template <typename Fabric>
CPD_DEVICE void PushStrip(const Block& block, const Rank& rank, const Strip& strip,
                          PushScratch* scratch) {
  for (int64_t t = strip.first_target; t < strip.end_target;) {
    int num = 0;  // t and num are equal on all threads
    for (; t < strip.end_target && num < kMulticast; ++t) {
      const int64_t dst = strip.dst_rank[t];
      if (dst < 0 || IsRemote<Fabric>(rank.call, dst)) continue;
      if (block.thread == 0) {
        scratch->rank[num] = static_cast<int>(dst);
        scratch->row[num] = strip.dst_offset[t] + strip.begin;
      }
      ++num;
    }
    if (block.thread == 0) scratch->num = num;
    block.Sync();
    if (scratch->num > 0) PushRows(block, rank, strip, scratch);
    block.Sync();
  }
}

// A kernel of `dispatch` if one device holds all ranks, or some reach each other over a network.
template <typename Fabric = Mapped>
CPD_DEVICE void Push(const Block& block, const Rank& rank, PushScratch* scratch) {
  ForEachStrip(block, rank,
               [&](const Strip& strip) { PushStrip<Fabric>(block, rank, strip, scratch); });
}

}  // namespace cpd::kernels
