// Attention to one range of keys per query, backward: what the blocks of queries
// (query_gradients.h) and of keys (key_gradients.h) share. The former sum dq, the latter dk and dv:
// nothing is added atomically, and sums have a fixed order.
#pragma once

#include "kernels/key_tiles.h"

namespace cpd::kernels {

// Columns of logits at a time: registers are scarce where each warp loads its own operands.
constexpr int kAtOnce = kHasWarpgroups ? kTile : 16;

// What the blocks of keys need to know of a tile of queries.
struct alignas(16) QueryTile {
  int32_t first, last;  // the keys that its rows see are in [first, last), which has holes
  uint32_t used[2];     // the rows that see any, as bits
  int32_t first_index, last_index;  // theirs, if keys have ranges
  int32_t unused[2];
};

// The blocks of queries tell it the blocks of keys: lse in units of log2, inf if the row has no
// probabilities, and the sum of dout out, minus dlse.
struct alignas(8) RowNumbers {
  float lse, delta;
};

// Of the whole softmax. Rows of numbers are [batch, num_heads, num_rows].
struct GradientsCall : AttentionOperands {
  const uint16_t* dout;  // [batch, num_rows, num_heads, Hv]
  const float* lse;      // -inf: no gradients
  const float* delta;    // sum of dout out, minus dlse; or nullptr, and
  Floats out;            // like dout
  const float* dlse;     // or nullptr: zero
  QueryTile* tiles;      // [batch, NumTiles(num_rows)], scratch memory
  RowNumbers* numbers;   // [batch, num_heads, num_rows], scratch memory
  MutableFloats dq;      // [batch, num_rows, num_heads, H]
  MutableFloats dk, dv;  // [batch, num_keys, num_kv_heads, H]; of dv: Hv
};

// Of [16, kAtOnce] logits: x becomes the probabilities, dx the derivatives of the scaled logits.
// `scale`, to units of log2. `lse_of`, `delta_of` and `sees` take a lane, a column / 8 and its
// element.
template <typename Lse, typename Delta, typename Sees>
CPD_DEVICE void Differentiate(Lanes<Sums>* x, Lanes<Sums>* dx, float scale, Lse lse_of,
                              Delta delta_of, Sees sees) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int n = 0; n < kAtOnce / 8; ++n) {
      CPD_UNROLL
      for (int i = 0; i < 4; ++i) {
        float &p = x[n][lane].x[i], &dp = dx[n][lane].x[i];
        const bool is_seen = sees(lane, n, i);
        p = is_seen ? Exp2(p * scale - lse_of(lane, n, i)) : 0.0f;
        dp = is_seen ? p * (dp - delta_of(lane, n, i)) : 0.0f;
      }
    }
  });
}

// The same of logits with a soft cap, or of keys with ranges, whose Allows() is `allows`.
template <typename Lse, typename Delta, typename Sees, typename Allows>
CPD_DEVICE void DifferentiateSpecial(const AttentionOperands& of, Lanes<Sums>* x, Lanes<Sums>* dx,
                                     Lse lse_of, Delta delta_of, Sees sees, Allows allows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int n = 0; n < kAtOnce / 8; ++n) {
      CPD_UNROLL
      for (int i = 0; i < 4; ++i) {
        float &p = x[n][lane].x[i], &dp = dx[n][lane].x[i];
        Capped capped{p * (of.scale * kLog2E), 1};
        if (of.soft_cap > 0) capped = Cap(p * of.scale, of.soft_cap);
        const bool is_seen = sees(lane, n, i) && (!of.index || allows(lane, n, i));
        p = is_seen ? Exp2(capped.logit - lse_of(lane, n, i)) : 0.0f;
        dp = is_seen ? p * (dp - delta_of(lane, n, i)) * capped.slope : 0.0f;
      }
    }
  });
}

// ---- A block of queries: sums dq, and tells the blocks of keys what they need to know of its
// rows.

template <int H, int Hv>
struct QueriesScratch {
  static constexpr bool kHasQueries = H + Hv > 256;  // else they are in registers
  KeyStages<H, Hv, (kHasQueries ? 1 : 2)> stages;
  Tile<kHasQueries ? H : 0> q;
  Tile<kHasQueries ? Hv : 0> dout;
  RowRanges rows;
};

// 16 queries.
template <typename Element, int H, int Hv>
struct QueriesWarp {
  static constexpr bool kHasQueries = QueriesScratch<H, Hv>::kHasQueries;
  Lanes<Four> q[kHasQueries ? 1 : H / 16], dout[kHasQueries ? 1 : Hv / 16];
  Lanes<Sums> dq[H / 8];
  Lanes<float> lse[2], delta[2];  // of rows lane / 4 and lane / 4 + 8

  CPD_DEVICE void Begin(const GradientsCall& call, const TileOfHead& at, int first) {
    const auto rows_of = [&](auto* array, auto size) {
      return RowsOf<size>(array, at.batch, call.num_rows, call.num_heads, at.head);
    };
    constexpr std::integral_constant<int, H> kKey;
    constexpr std::integral_constant<int, Hv> kValue;
    const auto of_dout = rows_of(call.dout, kValue);
    if constexpr (!kHasQueries) {
      ReadLeft<H>(q, rows_of(call.q, kKey), first, call.num_rows);
      ReadLeft<Hv>(dout, of_dout, first, call.num_rows);
    }
    Clear<H>(dq);
    if (!call.delta && call.out.is_wide) {
      const auto* out = static_cast<const float*>(call.out.data);
      Dot<Element, Hv>(delta, of_dout, rows_of(out, kValue), first, call.num_rows);
    } else if (!call.delta) {
      const auto* out = static_cast<const uint16_t*>(call.out.data);
      Dot<Element, Hv>(delta, of_dout, rows_of(out, kValue), first, call.num_rows);
    }
    const int64_t numbers = (int64_t{at.batch} * call.num_heads + at.head) * call.num_rows;
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first + lane / 4 + 8 * r;
        lse[r][lane] = INFINITY;
        if (row >= call.num_rows) {
          delta[r][lane] = 0;
          continue;
        }
        const float of_row = call.lse[numbers + row];
        if (of_row != -INFINITY) lse[r][lane] = of_row * kLog2E;
        if (call.delta) delta[r][lane] = call.delta[numbers + row];
        if (call.dlse) delta[r][lane] -= call.dlse[numbers + row];
        if (lane % 4 != 0) continue;
        call.numbers[numbers + row] = {lse[r][lane], delta[r][lane]};
      }
    });
  }

  // Adds the tile of keys from `first_key` on.
  CPD_DEVICE void Add(const GradientsCall& call, const QueriesScratch<H, Hv>& scratch, int of_warp,
                      int first_key, const Tile<H>& k, const Tile<Hv>& v, const KeyRanges& keys) {
    const RowRanges& rows = scratch.rows;
    CPD_UNROLL
    for (int key = 0; key < kTile; key += kAtOnce) {
      Lanes<Sums> p[kAtOnce / 8], dp[kAtOnce / 8];
      Products(
          [&] {
            if constexpr (kHasQueries) {
              MultiplyTransposed<Element, kAtOnce>(p, scratch.q, of_warp, k, key);
              MultiplyTransposed<Element, kAtOnce>(dp, scratch.dout, of_warp, v, key);
            } else {
              MultiplyTransposed<Element, kAtOnce>(p, q, k, key);
              MultiplyTransposed<Element, kAtOnce>(dp, dout, v, key);
            }
          },
          p, dp);
      const auto lse_of = [&](int lane, int, int i) { return lse[i / 2][lane]; };
      const auto delta_of = [&](int lane, int, int i) { return delta[i / 2][lane]; };
      const int first = first_key + key;
      const auto sees = [&](int lane, int n, int i) {
        const SeenColumns seen(rows, of_warp + RowOf(lane, i), first + ColumnOf(lane, 0));
        return seen.Have(8 * n + i % 2);
      };
      const float scale = call.scale * kLog2E;
      if (call.IsSpecial()) {
        DifferentiateSpecial(call, p, dp, lse_of, delta_of, sees, [&](int lane, int n, int i) {
          return keys.Allows(key + 8 * n + ColumnOf(lane, i), rows.index[of_warp + RowOf(lane, i)]);
        });
      } else if (rows.of_warp[of_warp / kWarpRows].Have(first, first + kAtOnce)) {
        Differentiate(p, dp, scale, lse_of, delta_of, [](int, int, int) { return true; });
      } else {
        Differentiate(p, dp, scale, lse_of, delta_of, sees);
      }
      Lanes<Four> left[kAtOnce / 16];
      Round<Element>(left, dp);
      Products([&] { AddProduct<Element>(dq, left, k, key); }, dq);
    }
  }
};

// Tells the blocks of keys about a tile of queries.
CPD_DEVICE void WriteQueryTile(QueryTile* tile, const RowRanges& rows) {
  const int start = rows.FirstKey(0), end = rows.EndOfKeys();
  const uint64_t used = rows.UsedRows();
  ForAttentionThreads([&](int thread) {
    if (thread != 0) return;
    *tile = {start,
             end,
             {static_cast<uint32_t>(used), static_cast<uint32_t>(used >> 32)},
             rows.first_index,
             rows.last_index,
             {}};
  });
}

// dq, and what the blocks of keys read. Block `index` of batch * num_heads * NumTiles(num_rows).
template <typename Element, int H, int Hv>
CPD_DEVICE void GradientsOfQueries(const GradientsCall& call, int index,
                                   QueriesScratch<H, Hv>* scratch, AsyncCopies* copies) {
  const TileOfHead tile = TileOfHead::OfQueries(call, index);
  RowRanges& rows = scratch->rows;
  rows.Copy(copies, call, tile.batch, tile.first);
  if constexpr (QueriesScratch<H, Hv>::kHasQueries) {
    const auto q = RowsOf<H>(call.q, tile.batch, call.num_rows, call.num_heads, tile.head);
    const auto dout = RowsOf<Hv>(call.dout, tile.batch, call.num_rows, call.num_heads, tile.head);
    const uint64_t there = LowBits(call.num_rows - tile.first);
    scratch->q.Copy(copies, q.Row(tile.first), q.stride, there);
    scratch->dout.Copy(copies, dout.Row(tile.first), dout.stride, there);
  }
  copies->Commit();
  using Warp = QueriesWarp<Element, H, Hv>;
  Warps<Warp> warps;
  ForWarps(&warps, [&](Warp& warp, int at) { warp.Begin(call, tile, tile.first + at); });
  copies->Wait(0);
  SyncCopies();
  rows.FindCommon(call.index);
  if (tile.head == 0) {  // the same for all heads
    WriteQueryTile(call.tiles + int64_t{tile.batch} * NumTiles(call.num_rows) + tile.first / kTile,
                   rows);
  }
  ForTilesOfKeys(call, tile, rows, &scratch->stages, copies,
                 [&](int key, const Tile<H>& k, const Tile<Hv>& v, const KeyRanges& keys) {
                   ForWarps(&warps, [&](Warp& warp, int at) {
                     warp.Add(call, *scratch, at, key, k, v, keys);
                   });
                 });
  const TileOfHead done = TileOfHead::OfQueries(call, Again(index));
  ForWarps(&warps, [&](Warp& warp, int at) {
    WriteRows<Element, H>(
        call.dq, done.batch, call.num_rows, call.num_heads, done.head, warp.dq,
        [&](int, int) { return call.scale; }, done.first + at);
  });
}

// ---- A block of keys: sums dk and dv over the tiles of queries that see one of its keys.

// Rows of a tile of queries in the block's memory.
struct QueryRows : RowRanges {
  RowNumbers numbers[kTile];  // 0 of rows that do not exist

  CPD_DEVICE void Copy(AsyncCopies* copies, const GradientsCall& of, int batch, int head,
                       int first) {
    RowRanges::Copy(copies, of, batch, first);
    const int64_t all = (int64_t{batch} * of.num_heads + head) * of.num_rows;
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = first + i < of.num_rows;
        copies->Copy<8>(numbers + i, of.numbers + (is_there ? all + first + i : 0), is_there);
      }
    });
  }
};

template <int H, int Hv>
struct KeysScratch {
  Tile<H> k;
  Tile<Hv> v;
  Tile<H> q[2];
  Tile<Hv> dout[2];
  QueryRows rows[2];
  KeyRanges keys;  // if they have any
};

// What a block of keys computes. Registers do not hold both for large heads.
enum class Part { kBoth, kK, kV };

template <typename Element, int H, int Hv, Part kPart>
struct KeysWarp {
  static constexpr bool kHasK = kPart != Part::kV, kHasV = kPart != Part::kK;
  Lanes<Sums> dk[kHasK ? H / 8 : 1], dv[kHasV ? Hv / 8 : 1];

  // Adds a tile of queries. Keys and values are read again each time: dk and dv fill the registers.
  CPD_DEVICE void Add(const GradientsCall& call, const KeysScratch<H, Hv>& scratch, int at,
                      int first_key, int stage) {
    const Tile<H>& q = scratch.q[stage];
    const Tile<Hv>& dout = scratch.dout[stage];
    const QueryRows& rows = scratch.rows[stage];
    CPD_NO_UNROLL
    for (int query = 0; query < kTile; query += kAtOnce) {
      Lanes<Sums> p[kAtOnce / 8], dp[kAtOnce / 8];
      Products(
          [&] {
            MultiplyTransposed<Element, kAtOnce>(p, scratch.k, at, q, query);
            if constexpr (kHasK) {
              MultiplyTransposed<Element, kAtOnce>(dp, scratch.v, at, dout, query);
            }
          },
          p, dp);
      if constexpr (!kHasK) Clear<kAtOnce>(dp);  // nothing reads it
      const auto row_of = [&](int lane, int n, int i) { return query + 8 * n + ColumnOf(lane, i); };
      const auto lse_of = [&](int lane, int n, int i) {
        return rows.numbers[row_of(lane, n, i)].lse;
      };
      const auto delta_of = [&](int lane, int n, int i) {
        return rows.numbers[row_of(lane, n, i)].delta;
      };
      const int key = first_key + at;
      const auto sees = [&](int lane, int n, int i) {
        return rows.Sees(row_of(lane, n, i), key + RowOf(lane, i));
      };
      const float scale = call.scale * kLog2E;
      if (call.IsSpecial()) {
        DifferentiateSpecial(call, p, dp, lse_of, delta_of, sees, [&](int lane, int n, int i) {
          return scratch.keys.Allows(at + RowOf(lane, i), rows.index[row_of(lane, n, i)]);
        });
      } else if (rows.Common<kAtOnce>(query).Have(key, key + kWarpRows)) {
        Differentiate(p, dp, scale, lse_of, delta_of, [](int, int, int) { return true; });
      } else {
        Differentiate(p, dp, scale, lse_of, delta_of, sees);
      }
      Lanes<Four> left[kAtOnce / 16], of_dk[kAtOnce / 16];
      if constexpr (kHasV) Round<Element>(left, p);
      if constexpr (kHasK) Round<Element>(of_dk, dp);
      Products(
          [&] {
            if constexpr (kHasV) AddProduct<Element>(dv, left, dout, query);
            if constexpr (kHasK) AddProduct<Element>(dk, of_dk, q, query);
          },
          dv, dk);
    }
  }
};

// Finds the tiles of queries whose keys may be among [first_key, first_key + kTile), in order: for
// each, the heads that share these keys in turn.
class QueryTiles {
 public:
  struct One {
    int head;   // of the group
    int first;  // query; kNone after the last tile
    uint64_t used;
  };

  // `keys` have found their earliest and latest query, if they have ranges.
  CPD_DEVICE QueryTiles(const GradientsCall& call, int batch, int first_key, const KeyRanges& keys)
      : call_(call), keys_(keys), batch_(batch), first_key_(first_key) {}

  // All lanes of a warp call it.
  CPD_DEVICE One Next() {
    if (tile_ == kNone || ++head_ == call_.num_heads / call_.num_kv_heads) {
      head_ = 0;
      tile_ = NextTile();
    }
    if (tile_ == kNone) return {0, kNone, 0};
    const uint32_t (&used)[2] = Tiles()[tile_].used;
    return {head_, tile_ * kTile, used[0] | uint64_t{used[1]} << 32};
  }

 private:
  CPD_DEVICE int NumTilesOfQueries() const { return NumTiles(call_.num_rows); }
  CPD_DEVICE const QueryTile* Tiles() const {
    return call_.tiles + int64_t{batch_} * NumTilesOfQueries();
  }

  CPD_DEVICE int NextTile() {
    while (!candidates_) {
      first_ += 64;
      if (first_ >= NumTilesOfQueries()) return kNone;
      if (first_ & 64) {  // read with the 64 tiles before
        candidates_ = later_;
      } else {
        candidates_ = Meeting(first_);
        later_ = Meeting(first_ + 64);
      }
    }
    const int tile = first_ + FirstBit(candidates_);
    candidates_ &= candidates_ - 1;
    return tile;
  }

  // Which of the 64 tiles from `first` on meet the keys.
  CPD_DEVICE uint64_t Meeting(int first) const {
    uint32_t bits[2];
    CPD_UNROLL
    for (int i = 0; i < 2; ++i) {
      bits[i] = LanesWhere([&](int lane) {
        const int tile = first + 32 * i + lane;
        if (tile >= NumTilesOfQueries()) return false;
        const QueryTile& of = Tiles()[tile];
        if (of.first >= first_key_ + kTile || of.last <= first_key_) return false;
        return !call_.index || (of.first_index < keys_.latest && of.last_index >= keys_.earliest);
      });
    }
    return bits[0] | uint64_t{bits[1]} << 32;
  }
  CPD_DEVICE static int FirstBit(uint64_t bits) {
#ifdef __CUDACC__
    return __ffsll(static_cast<long long>(bits)) - 1;
#else
    return __builtin_ctzll(bits);
#endif
  }

  const GradientsCall& call_;
  const KeyRanges& keys_;
  int batch_, first_key_;
  int head_ = 0, tile_ = kNone;
  int first_ = -64;  // the first one of the candidates
  uint64_t candidates_ = 0, later_ = 0;
};

// dk and dv, after the blocks of queries. Block `index` of batch * num_kv_heads *
// NumTiles(num_keys).
template <typename Element, Part kPart, int H, int Hv>
CPD_DEVICE void GradientsOfKeys(const GradientsCall& call, int index, KeysScratch<H, Hv>* scratch,
                                AsyncCopies* copies) {
  const TileOfHead tile = TileOfHead::OfKeys(call, index);
  const int first = tile.first;
  const auto k = RowsOf<H>(call.k, tile.batch, call.num_keys, call.num_kv_heads, tile.head);
  const auto v = RowsOf<Hv>(call.v, tile.batch, call.num_keys, call.num_kv_heads, tile.head);
  const uint64_t keys = LowBits(call.num_keys - first);
  scratch->k.Copy(copies, k.Row(first), k.stride, keys);
  scratch->v.Copy(copies, v.Row(first), v.stride, keys);
  if (call.index) {
    scratch->keys.Copy(copies, call, tile.batch, first);
    copies->Commit();
    copies->Wait(0);
    SyncAttention();
    scratch->keys.FindQueries();
  }
  const auto load = [&](const QueryTiles::One& of, int stage) {
    if (of.first != kNone) {
      const int head = tile.head * (call.num_heads / call.num_kv_heads) + of.head;
      const auto q = RowsOf<H>(call.q, tile.batch, call.num_rows, call.num_heads, head);
      const auto dout = RowsOf<Hv>(call.dout, tile.batch, call.num_rows, call.num_heads, head);
      scratch->q[stage].Copy(copies, q.Row(of.first), q.stride, of.used);
      scratch->dout[stage].Copy(copies, dout.Row(of.first), dout.stride, of.used);
      scratch->rows[stage].Copy(copies, call, tile.batch, head, of.first);
    }
    copies->Commit();
  };
  using Warp = KeysWarp<Element, H, Hv, kPart>;
  Warps<Warp> warps;
  ForWarps(&warps, [](Warp& warp, int) {
    if constexpr (Warp::kHasK) Clear<H>(warp.dk);
    if constexpr (Warp::kHasV) Clear<Hv>(warp.dv);
  });
  QueryTiles tiles(call, tile.batch, first, scratch->keys);
  int stage = 0;
  QueryTiles::One queries = tiles.Next();
  load(queries, stage);
  while (queries.first != kNone) {
    const QueryTiles::One next = tiles.Next();
    load(next, 1 - stage);
    copies->Wait(1);
    SyncCopies();
    if (scratch->rows[stage].FirstKey(first) < first + kTile) {
      ForWarps(&warps, [&](Warp& warp, int at) { warp.Add(call, *scratch, at, first, stage); });
    }
    SyncAttention();
    queries = next;
    stage = 1 - stage;
  }
  copies->Wait(0);  // of the keys, which nothing may have read
  const TileOfHead done = TileOfHead::OfKeys(call, Again(index));
  ForWarps(&warps, [&](Warp& warp, int at) {
    const auto write = [&](const MutableFloats& to, auto size, const Lanes<Sums>* x, float factor) {
      WriteRows<Element, size>(
          to, done.batch, call.num_keys, call.num_kv_heads, done.head, x,
          [&](int, int) { return factor; }, done.first + at);
    };
    if constexpr (Warp::kHasK) {
      write(call.dk, std::integral_constant<int, H>{}, warp.dk, call.scale);
    }
    if constexpr (Warp::kHasV) write(call.dv, std::integral_constant<int, Hv>{}, warp.dv, 1);
  });
}

}  // namespace cpd::kernels
