// Tiles of keys that meet a tile of queries: their rows in global memory, and which of them count.
#pragma once

#include "kernels/tile.h"

namespace cpd::kernels {

// ---- Rows of one head in global memory: read as the left of products, and written.

// Rows of one head in a dense array [batch, num_rows, num_heads, size].
template <typename T>
struct HeadRows {
  T* first;
  int stride;  // elements from one row to the next

  CPD_DEVICE T* Row(int row) const { return first + int64_t{row} * stride; }
};

template <int kSize, typename T>
CPD_DEVICE HeadRows<T> RowsOf(T* array, int batch, int num_rows, int num_heads, int head) {
  return {array + (int64_t{batch} * num_rows * num_heads + head) * kSize, num_heads * kSize};
}

// An array like this of float, or of BF16 or F16.
struct Floats {
  const void* data;
  bool is_wide;
};
struct MutableFloats {
  void* data;
  bool is_wide;
  bool adds = false;  // to what it holds; it is wide then
};

// left [16, H] of a product, from row `first` on; rows beyond num_rows are zero.
template <int H>
CPD_DEVICE void ReadLeft(Lanes<Four>* left, const HeadRows<const uint16_t>& rows, int first,
                         int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane / 4 + 8 * i;
      const uint16_t* at = rows.Row(row) + lane % 4 * 2;
      CPD_UNROLL
      for (int k = 0; k < H / 16; ++k) {
        left[k][lane].pairs[i] = row < num_rows ? PairAt(at + 16 * k) : 0;
        left[k][lane].pairs[i + 2] = row < num_rows ? PairAt(at + 16 * k + 8) : 0;
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
struct alignas(8) FourElements {
  uint32_t pairs[2];
};

// Writes x [16, H] times a factor of each row, from row `first` on, up to num_rows; or adds it.
template <int H, typename F>
CPD_DEVICE void WriteRows(const HeadRows<float>& to, bool adds, const Lanes<Sums>* x, F factor_of,
                          int first, int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + lane / 4 + 8 * r;
      if (row >= num_rows) continue;
      const float factor = factor_of(lane, r);
      CPD_UNROLL
      for (int n = 0; n < H / 8; ++n) {
        const float* pair = x[n][lane].x + 2 * r;
        auto* at = reinterpret_cast<FloatPair*>(to.Row(row) + 8 * n + ColumnOf(lane, 0));
        const FloatPair before = adds ? *at : FloatPair{};
        *at = {{before.x[0] + pair[0] * factor, before.x[1] + pair[1] * factor}};
      }
    }
  });
}

// Likewise rounded. Neighbours swap pairs, so that a lane writes four elements that are contiguous,
// and four lanes write 32 bytes.
template <typename Element, int H, typename F>
CPD_DEVICE void WriteRows(const HeadRows<uint16_t>& to, const Lanes<Sums>* x, F factor_of,
                          int first, int num_rows) {
  CPD_UNROLL
  for (int r = 0; r < 2; ++r) {
    CPD_UNROLL
    for (int n = 0; n < H / 8; n += 2) {
      Lanes<uint32_t> kept, sent;
      ForLanes([&](int lane) {
        const float factor = factor_of(lane, r);
        const float *a = x[n][lane].x + 2 * r, *b = x[n + 1][lane].x + 2 * r;
        const uint32_t low = Pack<Element>(a[0] * factor, a[1] * factor);
        const uint32_t high = Pack<Element>(b[0] * factor, b[1] * factor);
        kept[lane] = lane % 2 ? high : low;
        sent[lane] = lane % 2 ? low : high;
      });
      const Lanes<uint32_t> got = OfNeighbours(sent);
      ForLanes([&](int lane) {
        const int row = first + lane / 4 + 8 * r;
        if (row >= num_rows) return;
        uint16_t* at = to.Row(row) + 8 * (n + lane % 2) + lane % 4 / 2 * 4;
        *reinterpret_cast<FourElements*>(at) = lane % 2 ? FourElements{{got[lane], kept[lane]}}
                                                        : FourElements{{kept[lane], got[lane]}};
      });
    }
  }
}

// Likewise into one head of an array of either type.
template <typename Element, int H, typename F>
CPD_DEVICE void WriteRows(const MutableFloats& to, int batch, int num_rows, int num_heads, int head,
                          const Lanes<Sums>* x, F factor_of, int first) {
  if (to.is_wide) {
    const auto rows = RowsOf<H>(static_cast<float*>(to.data), batch, num_rows, num_heads, head);
    WriteRows<H>(rows, to.adds, x, factor_of, first, num_rows);
  } else {
    const auto rows = RowsOf<H>(static_cast<uint16_t*>(to.data), batch, num_rows, num_heads, head);
    WriteRows<Element, H>(rows, x, factor_of, first, num_rows);
  }
}

// Sums of products [16] of rows [16, H] of two arrays, of which the first has elements.
template <typename Element, int H, typename T>
CPD_DEVICE void Dot(Lanes<float> (&sums)[2], const HeadRows<const uint16_t>& left,
                    const HeadRows<T>& rows, int first, int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + lane / 4 + 8 * r;
      float sum = 0;
      if (row < num_rows) {
        const T* at = rows.Row(row) + lane % 4 * 2;
        const uint16_t* of_left = left.Row(row) + lane % 4 * 2;
        CPD_UNROLL
        for (int k = 0; k < H / 16; ++k) {
          CPD_UNROLL
          for (int half = 0; half < 2; ++half) {
            const uint32_t pair = PairAt(of_left + 16 * k + 8 * half);
            const T* two = at + 16 * k + 8 * half;
            float x[2];
            if constexpr (sizeof(T) == 2) {
              const uint32_t bits = PairAt(two);
              x[0] = Unpack<Element>(bits, 0), x[1] = Unpack<Element>(bits, 1);
            } else {
              const FloatPair floats = *reinterpret_cast<const FloatPair*>(two);
              x[0] = floats.x[0], x[1] = floats.x[1];
            }
            sum += Unpack<Element>(pair, 0) * x[0] + Unpack<Element>(pair, 1) * x[1];
          }
        }
      }
      sums[r][lane] = sum;
    }
  });
  CPD_UNROLL
  for (int r = 0; r < 2; ++r) OverRow(&sums[r], [](float x, float y) { return x + y; });
}

// ---- What the kernels of attention share: their operands, and the tiles of keys that queries
// attend to. A block has four warps of 16 rows.

constexpr int kNone = 0x7fffffff;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Arrays are dense, in the order of the caller. Elements are the bits of BF16 or F16. A query sees
// a key of its range if its own index is in the range of the key.
struct AttentionOperands {
  const uint16_t* q;           // [batch, num_rows, num_heads, H]
  const uint16_t *k, *v;       // [batch, num_keys, num_kv_heads, H]; of v: Hv
  const int32_t *start, *end;  // [batch, num_rows]: the keys of each row, in [0, num_keys]
  int batch, num_rows, num_keys;
  int num_heads, num_kv_heads;             // query head n reads head n / (num_heads / num_kv_heads)
  float scale;                             // of logits
  float soft_cap;                          // of scaled logits; 0: none
  const int32_t* index;                    // [batch, num_rows]; or nullptr: keys have no ranges
  const int32_t *first_query, *end_query;  // [batch, num_keys]

  // Whether logits are more than products.
  CPD_DEVICE bool IsSpecial() const { return soft_cap > 0 || index; }
};

// c tanh(x / c), in units of log2, for a soft cap c of the scaled x; and the derivative.
struct Capped {
  float logit, slope;
};
CPD_DEVICE Capped Cap(float x, float soft_cap) {
  const float ratio = Tanh(x / soft_cap);
  return {soft_cap * kLog2E * ratio, 1 - ratio * ratio};
}

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
  int32_t index[kTile];             // if keys have ranges
  int32_t first_index, last_index;  // of rows that see keys
  CommonKeys of_warp[kAttentionWarps], of_block;

  CPD_DEVICE void Copy(AsyncCopies* copies, const AttentionOperands& of, int batch, int first) {
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = first + i < of.num_rows;
        const int64_t at = is_there ? int64_t{batch} * of.num_rows + first + i : 0;
        copies->Copy<4>(start + i, of.start + at, is_there);
        copies->Copy<4>(end + i, of.end + at, is_there);
        if (of.index) copies->Copy<4>(index + i, of.index + at, is_there);
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

  // Finds of_warp and of_block, for all threads; with ranges of keys, also the indices.
  CPD_DEVICE void FindCommon(bool has_index) {
    Warps<char> warps;
    ForWarps(&warps, [&](char&, int at) {
      const CommonKeys here = Common<kWarpRows>(at), all = Common<kTile>(0);
      const int first = has_index ? SmallestIndex(1) : 0, last = has_index ? -SmallestIndex(-1) : 0;
      ForLanes([&](int lane) {
        if (lane == 0) of_warp[at / kWarpRows] = here;
        if (lane == 0 && at == 0) of_block = all, first_index = first, last_index = last;
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
  // Of sign * index, over rows that see keys; kNone if there are none.
  CPD_DEVICE int SmallestIndex(int sign) const {
    return SmallestOfWarp([&](int lane) {
      int smallest = kNone;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        const int here = start[row] < end[row] ? sign * index[row] : kNone;
        smallest = here < smallest ? here : smallest;
      }
      return smallest;
    });
  }
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

// Ranges of keys in the block's memory; those of keys that do not exist are empty.
struct KeyRanges {
  int32_t first[kTile], end[kTile];
  int32_t earliest, latest;  // of the queries that may see a key: [earliest, latest)

  CPD_DEVICE void Copy(AsyncCopies* copies, const AttentionOperands& of, int batch, int from) {
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = from + i < of.num_keys;
        const int64_t at = is_there ? int64_t{batch} * of.num_keys + from + i : 0;
        copies->Copy<4>(first + i, of.first_query + at, is_there);
        copies->Copy<4>(end + i, of.end_query + at, is_there);
      }
    });
  }

  // Finds the queries that may see a key, for all threads.
  CPD_DEVICE void FindQueries() {
    const auto smallest = [&](auto of_key) {
      return SmallestOfWarp([&](int lane) {
        int found = kNone;
        CPD_UNROLL
        for (int key = lane; key < kTile; key += 32) {
          const int here = first[key] < end[key] ? of_key(key) : kNone;
          found = here < found ? here : found;
        }
        return found;
      });
    };
    const int begin = smallest([&](int key) { return first[key]; });
    const int stop = smallest([&](int key) { return -end[key]; });
    ForAttentionThreads([&](int thread) {
      if (thread == 0) earliest = begin, latest = -stop;
    });
    SyncAttention();
  }

  CPD_DEVICE bool Allows(int key, int index) const {
    return index >= first[key] && index < end[key];
  }
};

// Which of the kTile keys from `from` on a query may see whose index is in [first, last].
CPD_DEVICE uint64_t KeysAllowing(const AttentionOperands& of, int batch, int from, int first,
                                 int last) {
  const auto bits_of = [&](int half) -> uint64_t {
    return LanesWhere([&](int lane) {
      const int key = from + 32 * half + lane;
      if (key >= of.num_keys) return false;
      const int64_t at = int64_t{batch} * of.num_keys + key;
      const int earliest = of.first_query[at], end = of.end_query[at];
      return earliest < end && earliest <= last && end > first;
    });
  };
  const uint64_t low = bits_of(0), high = bits_of(1);
  return low | high << 32;
}

template <int H, int Hv, int kStages>
struct KeyStages {
  Tile<H> k[kStages];
  Tile<Hv> v[kStages];
  KeyRanges ranges[kStages];  // if keys have any
};

// Calls f(first key, k, v, ranges) for the tiles of keys that a row sees, and for no others, in
// order. With two stages, the next tile arrives meanwhile. Keys that no row sees are zeros: 0 * NaN
// is NaN. `rows` have found what they have in common.
template <int H, int Hv, int kStages, typename F>
CPD_DEVICE void ForTilesOfKeys(const AttentionOperands& of, const TileOfHead& at,
                               const RowRanges& rows, KeyStages<H, Hv, kStages>* stages,
                               AsyncCopies* copies, F f) {
  const int head = at.head / (of.num_heads / of.num_kv_heads);
  const auto k = RowsOf<H>(of.k, at.batch, of.num_keys, of.num_kv_heads, head);
  const auto v = RowsOf<Hv>(of.v, at.batch, of.num_keys, of.num_kv_heads, head);
  const auto used_keys = [&](int tile) {
    const bool are_common = rows.of_block.Have(tile, tile + kTile);
    uint64_t used = are_common ? ~uint64_t{0} : rows.UsedKeys(tile);
    if (of.index) used &= KeysAllowing(of, at.batch, tile, rows.first_index, rows.last_index);
    return used;
  };
  const auto tile_from = [&](int key) {
    if (!of.index && rows.of_block.Have(key, key + 1)) return key;
    while ((key = rows.FirstKey(key)) != kNone) {
      key = key / kTile * kTile;
      if (!of.index || used_keys(key)) break;
      key += kTile;
    }
    return key;
  };
  const auto load = [&](int tile, int stage) {
    if (tile != kNone) {
      const uint64_t used = used_keys(tile);
      stages->k[stage].Copy(copies, k.Row(tile), k.stride, used);
      stages->v[stage].Copy(copies, v.Row(tile), v.stride, used);
      if (of.index) stages->ranges[stage].Copy(copies, of, at.batch, tile);
    }
    copies->Commit();
  };
  int stage = 0;
  int tile = tile_from(0);
  load(tile, stage);
  while (tile != kNone) {
    const int next = tile_from(tile + kTile);
    if constexpr (kStages > 1) load(next, 1 - stage);
    copies->Wait(kStages - 1);
    SyncCopies();
    f(tile, stages->k[stage], stages->v[stage], stages->ranges[stage]);
    SyncAttention();
    tile = next;
    if constexpr (kStages > 1) {
      stage = 1 - stage;
    } else {
      load(tile, stage);
    }
  }
}

}  // namespace cpd::kernels
