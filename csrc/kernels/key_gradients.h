// A block of keys: sums dk and dv over the tiles of queries that see one of its keys.
#pragma once

#include "kernels/attention_gradients.h"

namespace cpd::kernels {

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
