// Additional steps for ranks that reach each other over a network: dispatch puts its rows, combine
// gets them. The network cannot access XLA's arrays, so both use the staging area.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/fabric.h"
#include "kernels/push.h"
#include "kernels/sum.h"

namespace cpd::kernels {

// A piece that goes to or comes from one remote rank.
struct RemotePiece : Piece {
  int rank;
  int64_t row;         // of that rank
  int64_t num_before;  // remote replicas of the slot before this one
};

template <typename Fabric, typename Move>
CPD_DEVICE void ForEachRemotePiece(const Block& block, const Rank& rank, Move move) {
  ForEachPiece(block, rank, [&](const Piece& piece) {
    int64_t num_before = 0;
    for (int64_t t = piece.first_target; t < piece.end_target; ++t) {
      const int64_t dst = piece.dst_rank[t];
      if (dst < 0 || !IsRemote<Fabric>(rank.call, dst)) continue;
      move(RemotePiece{piece, static_cast<int>(dst), piece.dst_offset[t] + piece.begin,
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
    tags[i] = TagOf(state.epoch, rank.rank());
  }
  for (int p = 0; p < call.num_parts; ++p) {
    const Part& part = call.parts[p];
    CopyIn(block, rank, part, {part.staged_rows, rank.channel(), &Array::staged}, ByRegisters{});
  }
}

// Puts rows and tags into the channels of remote ranks. They have arrived after Quiet.
template <typename Fabric>
CPD_DEVICE void Put(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  ForEachRemotePiece<Fabric>(block, rank, [&](const RemotePiece& piece) {
    const Part& part = piece.part;
    char* half = Half(call, piece.rank, rank.state()->epoch);
    const int64_t src_row = rank.slots(part)[piece.slot].src_row + piece.begin;
    for (int64_t r = 0; r < piece.num_rows; r += kTagRun) {
      const int64_t n = piece.num_rows - r < kTagRun ? piece.num_rows - r : kTagRun;
      Fabric::Put(block, half + part.tags + 8 * (piece.row + r), rank.channel() + call.staged_tags,
                  8 * n, call.pe[piece.rank]);
    }
    for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      Fabric::Put(block, half + array.data + piece.row * array.in_row_bytes,
                  rank.channel() + array.staged + src_row * array.in_row_bytes,
                  piece.num_rows * array.in_row_bytes, call.pe[piece.rank]);
    }
  });
}

// After the wait: gets the rows of remote ranks to where Pull reads them. They have arrived after
// Quiet.
template <typename Fabric>
CPD_DEVICE void Fetch(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  ForEachRemotePiece<Fabric>(block, rank, [&](const RemotePiece& piece) {
    const Part& part = piece.part;
    const char* half = Half(call, piece.rank, rank.state()->epoch);
    const int64_t row = rank.first_fetched(part)[piece.slot] +
                        piece.num_before * rank.slots(part)[piece.slot].num_rows + piece.begin;
    for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      Fabric::Get(block, rank.channel() + array.staged + row * array.in_row_bytes,
                  half + array.data + piece.row * array.in_row_bytes,
                  piece.num_rows * array.in_row_bytes, call.pe[piece.rank]);
    }
  });
}

}  // namespace cpd::kernels
