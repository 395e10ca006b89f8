// What the kernels of attention share: their operands, and the tiles of keys that queries attend
// to. A block has four warps of 16 rows.
#pragma once

#include "kernels/tile.h"

namespace cpd::kernels {

constexpr int kNone = 0x7fffffff;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Rows of a matrix are contiguous; elements are the bits of bfloat16.
struct AttentionOperands {
  const uint16_t* q;           // [num_matrices, num_rows, H]
  const uint16_t *k, *v;       // [num_matrices, num_keys, H]
  const int32_t *start, *end;  // [num_matrices, num_rows]: the keys of each row
  int64_t num_matrices;
  int num_rows, num_keys;
  float scale;  // of logits
};

CPD_DEVICE int NumTiles(int rows) { return (rows + kTile - 1) / kTile; }

// A variable of every warp of a block: one on a GPU, all on the host.
template <typename T>
struct Warps {
#ifdef __CUDACC__
  T value[1];
#else
  T value[kAttentionWarps];
#endif
};

// Calls f(variable, first row of the warp in its block).
template <typename T, typename F>
CPD_DEVICE void ForWarps(Warps<T>* warps, F f) {
#ifdef __CUDACC__
  f(warps->value[0], static_cast<int>(threadIdx.x / 32) * kWarpRows);
#else
  for (int w = 0; w < kAttentionWarps; ++w) f(warps->value[w], w * kWarpRows);
#endif
}

// Numbers of rows in the block's memory; those of rows that do not exist are 0.
struct RowNumbers {
  int32_t start[kTile], end[kTile];
  float lse[kTile], delta[kTile];

  // `lse` and `delta` of the matrices' rows may be nullptr.
  CPD_DEVICE void Copy(AsyncCopies* copies, const AttentionOperands& of, int64_t matrix, int first,
                       const float* all_lse, const float* all_delta) {
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = first + i < of.num_rows;
        const int64_t at = is_there ? matrix * of.num_rows + first + i : 0;
        copies->Copy<4>(start + i, of.start + at, is_there);
        copies->Copy<4>(end + i, of.end + at, is_there);
        if (all_lse) copies->Copy<4>(lse + i, all_lse + at, is_there);
        if (all_delta) copies->Copy<4>(delta + i, all_delta + at, is_there);
      }
    });
  }

  CPD_DEVICE bool Sees(int row, int key) const { return key >= start[row] && key < end[row]; }

  // Whether kNum rows, from `first` on, see all the keys [from, to).
  template <int kNum>
  CPD_DEVICE bool SeeAll(int first, int from, int to) const {
    return !LanesWhere([&](int lane) {
      bool sees = true;
      CPD_UNROLL
      for (int row = first + lane; row < first + kNum; row += 32) {
        sees = sees && start[row] <= from && end[row] >= to;
      }
      return !sees;
    });
  }

  // The first key from `from` on that one of the rows sees; kNone if there is none.
  CPD_DEVICE int FirstKey(int from, int num_keys) const {
    return SmallestOfWarp([&](int lane) {
      int first = kNone;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        const int key = start[row] > from ? start[row] : from;
        const int stop = end[row] < num_keys ? end[row] : num_keys;
        if (key < stop && key < first) first = key;
      }
      return first;
    });
  }

  // After the last key that one of the rows sees; 0 if there is none.
  CPD_DEVICE int EndOfKeys() const {
    return -SmallestOfWarp([&](int lane) {
      int last = 0;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        if (start[row] < end[row] && end[row] > last) last = end[row];
      }
      return -last;
    });
  }

  // Whether one of the rows sees one of the keys [from, to).
  CPD_DEVICE bool See(int from, int to) const { return FirstKey(from, to) != kNone; }
};

template <int H>
struct KeyStages {
  Tile<H> k[2], v[2];
};

// Calls f(first key, k, v) for the tiles of keys that a row sees, and for no others, in order. The
// next tile arrives meanwhile.
template <int H, typename F>
CPD_DEVICE void ForTilesOfKeys(const AttentionOperands& of, int64_t matrix, const RowNumbers& rows,
                               KeyStages<H>* stages, AsyncCopies* copies, F f) {
  const uint16_t *k = of.k + matrix * of.num_keys * H, *v = of.v + matrix * of.num_keys * H;
  const auto tile_from = [&](int key) {
    key = rows.FirstKey(key, of.num_keys);
    return key == kNone ? kNone : key / kTile * kTile;
  };
  const auto load = [&](int tile, int stage) {
    if (tile != kNone) {
      stages->k[stage].Copy(copies, k, tile, of.num_keys);
      stages->v[stage].Copy(copies, v, tile, of.num_keys);
    }
    copies->Commit();
  };
  int stage = 0;
  int tile = tile_from(0);
  load(tile, stage);
  while (tile != kNone) {
    const int next = tile_from(tile + kTile);
    load(next, 1 - stage);
    copies->Wait(1);
    SyncCopies();
    f(tile, stages->k[stage], stages->v[stage]);
    SyncAttention();
    tile = next;
    stage = 1 - stage;
  }
}

// left [16, H] of a product, from global memory; rows beyond num_rows are zero.
template <int H>
CPD_DEVICE void ReadLeft(Lanes<Four>* left, const uint16_t* rows, int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int k = 0; k < H / 16; ++k) {
      CPD_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i % 2 * 8, column = 16 * k + i / 2 * 8 + lane % 4 * 2;
        left[k][lane].pairs[i] = row < num_rows ? PairAt(rows + int64_t{row} * H + column) : 0;
      }
    }
  });
}

template <int H>
CPD_DEVICE void Clear(Lanes<Sums>* out) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int n = 0; n < H / 8; ++n) out[n][lane] = Sums{};
  });
}

struct alignas(8) FloatPair {
  float x[2];
};

// Writes out [16, H] times a factor, up to num_rows.
template <int H>
CPD_DEVICE void WriteRows(float* to, const Lanes<Sums>* out, float factor, int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int n = 0; n < H / 8; ++n) {
      CPD_UNROLL
      for (int i = 0; i < 4; i += 2) {
        const float* x = out[n][lane].x + i;
        float* at = to + int64_t{RowOf(lane, i)} * H + 8 * n + ColumnOf(lane, i);
        if (RowOf(lane, i) < num_rows) {
          *reinterpret_cast<FloatPair*>(at) = {{x[0] * factor, x[1] * factor}};
        }
      }
    }
  });
}

}  // namespace cpd::kernels
