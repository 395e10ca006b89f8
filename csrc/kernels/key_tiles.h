// What the kernels of attention share: their operands, and the tiles of keys that queries attend
// to. A block has four warps of 16 rows.
#pragma once

#include "kernels/head_rows.h"

namespace cpd::kernels {

constexpr int kNone = 0x7fffffff;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Arrays are dense, in the order of the caller. Elements are the bits of BF16 or F16.
struct AttentionOperands {
  const uint16_t* q;           // [batch, num_rows, num_heads, H]
  const uint16_t *k, *v;       // [batch, num_keys, num_kv_heads, H]; of v: Hv
  const int32_t *start, *end;  // [batch, num_rows]: the keys of each row, in [0, num_keys]
  int batch, num_rows, num_keys;
  int num_heads, num_kv_heads;  // query head n reads head n / (num_heads / num_kv_heads)
  float scale;                  // of logits
};

CPD_HOST_DEVICE inline int NumTiles(int rows) { return (rows + kTile - 1) / kTile; }

// The tile of rows of one head that a block computes.
struct TileOfHead {
  int batch, head, first;

  // Of block `index` of batch * num_heads * NumTiles(num_rows). Heads that share keys follow one
  // another.
  CPD_DEVICE static TileOfHead OfQueries(const AttentionOperands& of, int index) {
    const int group = of.num_heads / of.num_kv_heads, num_tiles = NumTiles(of.num_rows);
    const TileOfHead tile = At(index / group, num_tiles, of.num_kv_heads);
    return {tile.batch, tile.head * group + index % group, tile.first};
  }
  // Of block `index` of batch * num_kv_heads * NumTiles(num_keys).
  CPD_DEVICE static TileOfHead OfKeys(const AttentionOperands& of, int index) {
    return At(index, NumTiles(of.num_keys), of.num_kv_heads);
  }

 private:
  CPD_DEVICE static TileOfHead At(int index, int num_tiles, int num_heads) {
    const int row = index / num_tiles;
    return {row / num_heads, row % num_heads, index % num_tiles * kTile};
  }
};

// The same number, of which the compiler does not know that: what follows from it is computed
// again, instead of staying in registers meanwhile.
CPD_DEVICE int Again(int x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

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

// Keys that all of some rows see: [from, to); none if `to` is not larger.
struct CommonKeys {
  int from, to;
  CPD_DEVICE bool Have(int first, int last) const { return first >= from && last <= to; }
};

// Ranges of rows in the block's memory; those of rows that do not exist are empty.
struct RowRanges {
  int32_t start[kTile], end[kTile];
  CommonKeys of_warp[kAttentionWarps], of_block;

  CPD_DEVICE void Copy(AsyncCopies* copies, const AttentionOperands& of, int batch, int first) {
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = first + i < of.num_rows;
        const int64_t at = is_there ? int64_t{batch} * of.num_rows + first + i : 0;
        copies->Copy<4>(start + i, of.start + at, is_there);
        copies->Copy<4>(end + i, of.end + at, is_there);
      }
    });
  }

  CPD_DEVICE bool Sees(int row, int key) const { return key >= start[row] && key < end[row]; }

  // The keys that kNum rows, from `first` on, have in common.
  template <int kNum>
  CPD_DEVICE CommonKeys Common(int first) const {
    const int from = -SmallestOfWarp([&](int lane) {
      int latest = 0;
      CPD_UNROLL
      for (int row = first + lane; row < first + kNum; row += 32) {
        latest = start[row] > latest ? start[row] : latest;
      }
      return -latest;
    });
    const int to = SmallestOfWarp([&](int lane) {
      int earliest = kNone;
      CPD_UNROLL
      for (int row = first + lane; row < first + kNum; row += 32) {
        earliest = end[row] < earliest ? end[row] : earliest;
      }
      return earliest;
    });
    return {from, to};
  }

  // Finds of_warp and of_block, for all threads.
  CPD_DEVICE void FindCommon() {
    Warps<char> warps;
    ForWarps(&warps, [&](char&, int at) {
      const CommonKeys here = Common<kWarpRows>(at), all = Common<kTile>(0);
      ForLanes([&](int lane) {
        if (lane == 0) of_warp[at / kWarpRows] = here;
        if (lane == 0 && at == 0) of_block = all;
      });
    });
    SyncAttention();
  }

  // The first key from `from` on that one of the rows sees; kNone if there is none.
  CPD_DEVICE int FirstKey(int from) const {
    return SmallestOfWarp([&](int lane) {
      int first = kNone;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        const int key = start[row] > from ? start[row] : from;
        if (key < end[row] && key < first) first = key;
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

  // Which of the kTile keys from `first` on one of the rows sees.
  CPD_DEVICE uint64_t UsedKeys(int first) const {
    const auto bits_of = [&](int half) {
      return BitsOfWarp([&](int lane) {
        uint32_t bits = 0;
        CPD_UNROLL
        for (int row = lane; row < kTile; row += 32) {
          const int from = InWord(start[row] - first - 32 * half);
          const int to = InWord(end[row] - first - 32 * half);
          if (from < to) bits |= static_cast<uint32_t>(LowBits(to) & ~LowBits(from));
        }
        return bits;
      });
    };
    const uint64_t low = bits_of(0), high = bits_of(1);
    return low | high << 32;
  }

  // Which rows see any key.
  CPD_DEVICE uint64_t UsedRows() const {
    const auto bits_of = [&](int half) -> uint64_t {
      return LanesWhere([&](int lane) { return start[32 * half + lane] < end[32 * half + lane]; });
    };
    const uint64_t low = bits_of(0), high = bits_of(1);
    return low | high << 32;
  }

 private:
  CPD_DEVICE static int InWord(int bit) { return bit < 0 ? 0 : bit > 32 ? 32 : bit; }
};

// Which keys from `first` on a row sees: their numbers, which are constants, are compared with two
// registers.
struct SeenColumns {
  int from, to;
  CPD_DEVICE SeenColumns(const RowRanges& rows, int row, int first)
      : from(rows.start[row] - first), to(rows.end[row] - first) {}
  CPD_DEVICE bool Have(int column) const { return column >= from && column < to; }
};

template <int H, int Hv>
struct KeyStages {
  Tile<H> k[2];
  Tile<Hv> v[2];
};

// Calls f(first key, k, v) for the tiles of keys that a row sees, and for no others, in order. The
// next tile arrives meanwhile. Keys that no row sees are zeros: 0 * NaN is NaN. `rows` have found
// what they have in common.
template <int H, int Hv, typename F>
CPD_DEVICE void ForTilesOfKeys(const AttentionOperands& of, const TileOfHead& at,
                               const RowRanges& rows, KeyStages<H, Hv>* stages, AsyncCopies* copies,
                               F f) {
  const int head = at.head / (of.num_heads / of.num_kv_heads);
  const auto k = RowsOf<H>(of.k, at.batch, of.num_keys, of.num_kv_heads, head);
  const auto v = RowsOf<Hv>(of.v, at.batch, of.num_keys, of.num_kv_heads, head);
  const auto tile_from = [&](int key) {
    if (rows.of_block.Have(key, key + 1)) return key;
    key = rows.FirstKey(key);
    return key == kNone ? kNone : key / kTile * kTile;
  };
  const auto load = [&](int tile, int stage) {
    if (tile != kNone) {
      const bool are_common = rows.of_block.Have(tile, tile + kTile);
      const uint64_t used = are_common ? ~uint64_t{0} : rows.UsedKeys(tile);
      stages->k[stage].Copy(copies, k.Row(tile), k.stride, used);
      stages->v[stage].Copy(copies, v.Row(tile), v.stride, used);
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

}  // namespace cpd::kernels
