// A small call in one kernel: one block per rank plans, sends, signals, waits and takes. It
// launches once, and what its steps pass to each other is still in the multiprocessor.
//
// Channel, messages, tags and signals are those of other calls (exchange.h), so a channel serves
// both, in any order; the ranks of one call need not even choose alike. They do: the choice depends
// on the call's shapes and on how many blocks a GPU runs.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/exchange.h"
#include "kernels/plan.h"
#include "kernels/push.h"
#include "kernels/sum.h"
#include "kernels/unpack.h"

namespace cpd::kernels {

// Of one rank: rows that are sent or held, with their tags.
constexpr int64_t kSmallBytes = 64 << 10;
// Of one plan: slots times replicas. A thread for each, and `combine` gathers all sources at once.
constexpr int64_t kSmallTargets = kMaxSources;

// ---- On the host.

inline bool IsSmall(const Call& call, int num_resident) {
  if (call.has_network) return false;
  // Ranks of several processes may share a GPU. Their blocks wait at the same time, so all of them
  // must fit half of its multiprocessors; the rest is for other kernels.
  if (!HoldsAllRanks(call) && 2 * kMoveBlocks * call.num_ranks > num_resident) return false;
  int64_t bytes = 0;
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    if (group.num_slots > kSmallTargets || group.num_slots * group.num_replicas > kSmallTargets ||
        group.num_tokens > kSmallBytes || group.capacity > kSmallBytes) {
      return false;
    }
    int64_t row_bytes = call.is_dispatch ? 8 : 0;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      row_bytes +=
          array.in_row_bytes > array.out_row_bytes ? array.in_row_bytes : array.out_row_bytes;
      if (row_bytes > kSmallBytes) return false;
    }
    const int64_t sent = group.num_tokens * group.num_replicas;
    bytes += row_bytes * (sent > group.capacity ? sent : group.capacity);
  }
  return bytes <= kSmallBytes;
}

// Decides whether a call is small. Its rows are pushed by warps; everything else moves at once.
inline void ChooseSmall(Call* call, int num_resident) {
  constexpr int64_t kLeast = 2 << 10,
                    kMost = 8 << 10;  // bytes of a strip; one step of a warp is 2 kB
  call->is_small = IsSmall(*call, num_resident);
  for (int p = 0; p < call->num_groups && call->is_small; ++p) {
    OperandGroup& group = call->groups[p];
    int64_t row_bytes = 0;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      row_bytes += call->arrays[a].in_row_bytes;
    }
    const int64_t of_warp = group.num_tokens * row_bytes * kWarpThreads / kMaxThreads;
    const int64_t bytes = of_warp < kLeast ? kLeast : of_warp < kMost ? of_warp : kMost;
    group.rows_per_push = bytes > row_bytes && row_bytes > 0 ? bytes / row_bytes : 1;
    const int64_t rows = group.num_tokens < group.capacity ? group.capacity : group.num_tokens;
    group.rows_per_strip = rows > 0 ? rows : 1;
  }
}

// ---- Where one device holds several ranks, two blocks serve each of them. A block draws its part
// when it starts. The first parts send, one for each rank, and they wait for nothing. The others
// take. So those for which a block waits run or have ended, however few blocks the GPU runs at
// once.

CPD_HOST_DEVICE inline int NumParts(const Call& call) {
  return call.num_local == 1 ? 1 : 2 * call.num_local;
}

struct CallPart {
  int local;  // the rank
  bool sends, takes;
  uint64_t number;  // of this small call of the device; 0: one block has both parts
};

struct SmallScratch {
  union {
    PlanScratch plan;
    PushScratch push[kMaxWarps];
    MeetScratch meet;
    UnpackScratch unpack;
    SumScratch sum;
  };
  uint64_t drawn;
};

CPD_DEVICE CallPart DrawPart(const Block& block, const Call& call, SmallScratch* scratch) {
  if (call.num_local == 1) return {0, true, true, 0};
  if (block.thread == 0) scratch->drawn = Append(&Rank{call, 0}.state()->parts_drawn);
  block.Sync();
  const auto num_parts = static_cast<uint64_t>(NumParts(call));
  const auto part = static_cast<int>(scratch->drawn % num_parts);
  const uint64_t number = scratch->drawn / num_parts + 1;
  const bool sends = part < call.num_local;
  return {sends ? part : part - call.num_local, sends, !sends, number};
}

// Waits until the part that sends for a rank has ended: it has the rank's state to itself. It has
// begun and waits for nothing; the deadline is for a GPU that is broken.
CPD_DEVICE void AwaitSent(const Block& block, const Rank& rank, uint64_t number) {
  if (block.thread == 0) {
    State* state = rank.state();
    const uint64_t begin = Nanoseconds();
    uint64_t seen;
    while ((seen = LoadAcquire(&state->parts_sent)) < number &&
           Nanoseconds() - begin < rank.call.deadline_ns) {
      Pause();
    }
    if (seen < number) {
      ErrorRecord error =
          ErrorOf(Failure::kDeadline, static_cast<int64_t>(number), static_cast<int64_t>(seen));
      error.peer = rank.rank();
      Raise(rank, error);
      state->broken = 1;
      state->failed = kGivenUp;
    }
  }
  block.Sync();
}

// ---- The kernel.

template <bool kIsDispatch>
CPD_DEVICE void SendSmall(const Block& block, const Rank& rank, uint64_t number,
                          SmallScratch* scratch) {
  Prepare(block, rank, &scratch->plan);
  block.Sync();
  if constexpr (kIsDispatch) {
    const Block warp = WarpOf(block);  // several strips at a time: each is a chain of loads
    Push(warp, rank, &scratch->push[warp.index]);
  } else if (!HoldsAllRanks(rank.call)) {
    Stage(block, rank);
  }
  block.Sync();
  Signal(block, rank);
  block.Sync();
  if (number > 0 && block.thread == 0) StoreRelease(&rank.state()->parts_sent, number);
}

template <bool kIsDispatch>
CPD_DEVICE void TakeSmall(const Block& block, const Rank& rank, SmallScratch* scratch) {
  Wait(block, rank, &scratch->meet);
  block.Sync();
  if constexpr (kIsDispatch) {
    Unpack(block, rank, &scratch->unpack);
  } else {
    Pull(block, rank, &scratch->sum);
  }
}

// Run by NumParts(call) blocks.
template <bool kIsDispatch>
CPD_DEVICE void RunSmall(const Block& block, const Call& call, SmallScratch* scratch) {
  const CallPart part = DrawPart(block, call, scratch);
  const Rank rank{call, part.local};
  const Block alone = AllTakers(block);  // the only one that sends, or takes, for its rank
  if (part.sends) SendSmall<kIsDispatch>(alone, rank, part.number, scratch);
  if (!part.takes) return;
  if (!part.sends) AwaitSent(alone, rank, part.number);
  TakeSmall<kIsDispatch>(alone, rank, scratch);
}

}  // namespace cpd::kernels
