// Additional steps for ranks that reach each other over a network: dispatch puts its rows, combine
// gets them. The network cannot access XLA's arrays, so both use the staging area.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/plan.h"
#include "kernels/push.h"
#include "kernels/sum.h"

namespace cpd::kernels {

// A strip that goes to or comes from one remote rank.
struct RemoteStrip : Strip {
  int rank;
  int64_t row;         // of that rank
  int64_t num_before;  // remote replicas of the slot before this one
};

template <typename Fabric, typename Move>
CPD_DEVICE void ForEachRemoteStrip(const Block& block, const Rank& rank, Move move) {
  ForEachStrip(block, rank, [&](const Strip& strip) {
    int64_t num_before = 0;
    for (int64_t t = strip.first_target; t < strip.end_target; ++t) {
      const int64_t dst = strip.dst_rank[t];
      if (dst < 0 || !IsRemote<Fabric>(rank.call, dst)) continue;
      move(RemoteStrip{strip, static_cast<int>(dst), strip.dst_offset[t] + strip.begin,
                       num_before++});
    }
  });
}

// Before Put: stages x, and the tags of one put.
CPD_DEVICE void StageToPut(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if (state.failed != kFine) return;
  auto* tags = reinterpret_cast<uint64_t*>(rank.channel() + call.staged_tags);
  for (int i = block.index * block.num_threads + block.thread; i < kTagRun;
       i += block.num_blocks * block.num_threads) {
    tags[i] = TagOf(state.epoch);
  }
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    CopyIn(block, rank, group, {group.staged_rows, rank.channel(), &Array::staged});
  }
}

// Puts rows and tags into the channels of remote ranks. They have arrived after Quiet.
template <typename Fabric>
CPD_DEVICE void Put(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  ForEachRemoteStrip<Fabric>(block, rank, [&](const RemoteStrip& strip) {
    const OperandGroup& group = strip.group;
    char* half = Half(call, strip.rank, rank.state()->epoch);
    const int64_t src_row = rank.slots(group)[strip.slot].src_row + strip.begin;
    for (int64_t r = 0; r < strip.num_rows; r += kTagRun) {
      const int64_t n = strip.num_rows - r < kTagRun ? strip.num_rows - r : kTagRun;
      Fabric::Put(block, half + group.tags + 8 * (strip.row + r), rank.channel() + call.staged_tags,
                  8 * n, call.pe[strip.rank]);
    }
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      Fabric::Put(block, half + array.data + strip.row * array.in_row_bytes,
                  rank.channel() + array.staged + src_row * array.in_row_bytes,
                  strip.num_rows * array.in_row_bytes, call.pe[strip.rank]);
    }
  });
}

// After the wait: gets the rows of remote ranks to where Pull reads them. They have arrived after
// Quiet.
template <typename Fabric>
CPD_DEVICE void Fetch(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  ForEachRemoteStrip<Fabric>(block, rank, [&](const RemoteStrip& strip) {
    const OperandGroup& group = strip.group;
    const char* half = Half(call, strip.rank, rank.state()->epoch);
    const int64_t row = rank.first_fetched(group)[strip.slot] +
                        strip.num_before * rank.slots(group)[strip.slot].num_rows + strip.begin;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      Fabric::Get(block, rank.channel() + array.staged + row * array.in_row_bytes,
                  half + array.data + strip.row * array.in_row_bytes,
                  strip.num_rows * array.in_row_bytes, call.pe[strip.rank]);
    }
  });
}

}  // namespace cpd::kernels
