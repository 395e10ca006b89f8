// Attention to one range of keys per query, backward. A block of queries sums dq, a block of keys
// dk and dv: nothing is added atomically, and sums have a fixed order.
#pragma once

#include "kernels/key_tiles.h"

namespace cpd::kernels {

// Columns of logits at a time: registers are scarce where each warp loads its own operands.
constexpr int kAtOnce = kHasWarpgroups ? kTile : 16;

struct GradientsCall : AttentionOperands {
  const uint16_t* dout;      // [num_matrices, num_rows, H]
  const float *lse, *delta;  // [num_matrices, num_rows], of the whole softmax: sum of dout out
  int32_t* reach;            // [num_matrices, NumTiles(num_rows), 2]: keys that each tile sees
  float* dq;                 // [num_matrices, num_rows, H]
  float *dk, *dv;            // [num_matrices, num_keys, H]
};

// Of [16, kAtOnce] logits: x becomes the probabilities, dx the derivatives of the scaled logits.
// Rows are queries from `query` on, and columns keys from `key` on, or the other way around.
template <bool kRowsAreKeys>
CPD_DEVICE void Differentiate(Lanes<Sums>* x, Lanes<Sums>* dx, const RowNumbers& rows, int query,
                              int key, float scale) {
  constexpr int kQueries = kRowsAreKeys ? kAtOnce : kWarpRows;
  constexpr int kKeys = kRowsAreKeys ? kWarpRows : kAtOnce;
  const auto differentiate = [&](auto sees) {
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int n = 0; n < kAtOnce / 8; ++n) {
        CPD_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = RowOf(lane, i), column = 8 * n + ColumnOf(lane, i);
          const int of_query = query + (kRowsAreKeys ? column : row);
          const int of_key = key + (kRowsAreKeys ? row : column);
          float &p = x[n][lane].x[i], &dp = dx[n][lane].x[i];
          p = sees(of_query, of_key) ? Exp2(p * (scale * kLog2E) - rows.lse[of_query] * kLog2E)
                                     : 0.0f;
          dp = p * (dp - rows.delta[of_query]);
        }
      }
    });
  };
  if (rows.SeeAll<kQueries>(query, key, key + kKeys)) {
    differentiate([](int, int) { return true; });
  } else {
    differentiate([&](int of_query, int of_key) { return rows.Sees(of_query, of_key); });
  }
}

template <int H>
struct QueriesScratch {
  KeyStages<H> stages;
  RowNumbers rows;
};

template <int H>
struct QueriesWarp {
  Lanes<Four> q[H / 16], dout[H / 16];
  Lanes<Sums> dq[H / 8];
};

// Tells which keys a block's queries see: [first, last), empty if none.
CPD_DEVICE void WriteReach(const GradientsCall& call, int64_t tile, const RowNumbers& rows) {
  const int start = rows.FirstKey(0, call.num_keys), end = rows.EndOfKeys();
  ForAttentionThreads([&](int thread) {
    if (thread == 0) call.reach[2 * tile] = start, call.reach[2 * tile + 1] = end;
  });
}

// dq and the reach. Block `index` of num_matrices * NumTiles(num_rows).
template <int H>
CPD_DEVICE void GradientsOfQueries(const GradientsCall& call, int64_t index,
                                   QueriesScratch<H>* scratch, AsyncCopies* copies) {
  const int num_tiles = NumTiles(call.num_rows);
  const int64_t matrix = index / num_tiles;
  const int first = static_cast<int>(index % num_tiles) * kTile;
  const int64_t first_row = matrix * call.num_rows + first;
  RowNumbers& rows = scratch->rows;
  rows.Copy(copies, call, matrix, first, call.lse, call.delta);
  copies->Commit();
  Warps<QueriesWarp<H>> warps;
  ForWarps(&warps, [&](QueriesWarp<H>& warp, int at) {
    ReadLeft<H>(warp.q, call.q + (first_row + at) * H, call.num_rows - first - at);
    ReadLeft<H>(warp.dout, call.dout + (first_row + at) * H, call.num_rows - first - at);
    Clear<H>(warp.dq);
  });
  copies->Wait(0);
  SyncAttention();
  WriteReach(call, index, rows);
  const auto add = [&](int first_key, const Tile<H>& k, const Tile<H>& v) {
    ForWarps(&warps, [&](QueriesWarp<H>& warp, int at) {
      CPD_UNROLL
      for (int key = 0; key < kTile; key += kAtOnce) {
        Lanes<Sums> p[kAtOnce / 8], dp[kAtOnce / 8];
        Products(
            [&] {
              MultiplyTransposed<kAtOnce>(p, warp.q, k, key);
              MultiplyTransposed<kAtOnce>(dp, warp.dout, v, key);
            },
            p, dp);
        Differentiate<false>(p, dp, rows, at, first_key + key, call.scale);
        Lanes<Four> left[kAtOnce / 16];
        Round(left, dp);
        Products([&] { AddProduct(warp.dq, left, k, key); }, warp.dq);
      }
    });
  };
  ForTilesOfKeys<H>(call, matrix, rows, &scratch->stages, copies, add);
  ForWarps(&warps, [&](QueriesWarp<H>& warp, int at) {
    WriteRows<H>(call.dq + (first_row + at) * H, warp.dq, call.scale, call.num_rows - first - at);
  });
}

template <int H>
struct KeysScratch {
  Tile<H> k, v;
  Tile<H> q[2], dout[2];
  RowNumbers rows[2];
};

template <int H>
struct KeysWarp {
  Lanes<Sums> dk[H / 8], dv[H / 8];

  // Adds a tile of queries. Keys and values are read again each time: dk and dv fill the registers.
  CPD_DEVICE void Add(const KeysScratch<H>& scratch, int at, int first_key, int stage,
                      float scale) {
    const Tile<H>&q = scratch.q[stage], &dout = scratch.dout[stage];
    CPD_NO_UNROLL
    for (int query = 0; query < kTile; query += kAtOnce) {
      Lanes<Sums> p[kAtOnce / 8], dp[kAtOnce / 8];
      Products(
          [&] {
            MultiplyTransposed<kAtOnce>(p, scratch.k, at, q, query);
            MultiplyTransposed<kAtOnce>(dp, scratch.v, at, dout, query);
          },
          p, dp);
      Differentiate<true>(p, dp, scratch.rows[stage], query, first_key + at, scale);
      Lanes<Four> left[kAtOnce / 16], of_dk[kAtOnce / 16];
      Round(left, p);
      Round(of_dk, dp);
      Products(
          [&] {
            AddProduct(dv, left, dout, query);
            AddProduct(dk, of_dk, q, query);
          },
          dv, dk);
    }
  }
};

// Finds the tiles of queries whose reach has one of the keys [first_key, first_key + kTile), in
// order. Not all of them see one: the reach has holes.
class QueryTiles {
 public:
  CPD_DEVICE QueryTiles(const GradientsCall& call, int64_t matrix, int first_key)
      : reach_(call.reach + 2 * matrix * NumTiles(call.num_rows)),
        num_tiles_(NumTiles(call.num_rows)),
        first_key_(first_key) {}

  // The first query of the next tile; kNone after the last one. All lanes of a warp call it.
  CPD_DEVICE int Next() {
    while (!candidates_) {
      if (first_ + 64 < end_) {  // the second half of the tiles that were read
        first_ += 64;
        candidates_ = later_;
        continue;
      }
      if (end_ >= num_tiles_) return kNone;
      first_ = end_;
      end_ += 128;
      candidates_ = Meeting(first_);
      later_ = Meeting(first_ + 64);
    }
    const int query = (first_ + FirstBit(candidates_)) * kTile;
    candidates_ &= candidates_ - 1;
    return query;
  }

 private:
  // Which of the 64 tiles from `first` on meet the keys.
  CPD_DEVICE uint64_t Meeting(int first) const {
    uint32_t bits[2];
    CPD_UNROLL
    for (int i = 0; i < 2; ++i) {
      bits[i] = LanesWhere([&](int lane) {
        const int tile = first + 32 * i + lane;
        return tile < num_tiles_ && reach_[2 * tile] < first_key_ + kTile &&
               reach_[2 * tile + 1] > first_key_;
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

  const int32_t* reach_;
  int num_tiles_, first_key_;
  int first_ = 0, end_ = 0;  // of the tiles that were read; the candidates' first one
  uint64_t candidates_ = 0, later_ = 0;
};

// dk and dv, after the reach. Block `index` of num_matrices * NumTiles(num_keys).
template <int H>
CPD_DEVICE void GradientsOfKeys(const GradientsCall& call, int64_t index, KeysScratch<H>* scratch,
                                AsyncCopies* copies) {
  const int num_tiles = NumTiles(call.num_keys);
  const int64_t matrix = index / num_tiles;
  const int first = static_cast<int>(index % num_tiles) * kTile;
  const int64_t of_matrix = matrix * call.num_rows * H;
  scratch->k.Copy(copies, call.k + matrix * call.num_keys * H, first, call.num_keys);
  scratch->v.Copy(copies, call.v + matrix * call.num_keys * H, first, call.num_keys);
  const auto load = [&](int query, int stage) {
    if (query != kNone) {
      scratch->q[stage].Copy(copies, call.q + of_matrix, query, call.num_rows);
      scratch->dout[stage].Copy(copies, call.dout + of_matrix, query, call.num_rows);
      scratch->rows[stage].Copy(copies, call, matrix, query, call.lse, call.delta);
    }
    copies->Commit();
  };
  Warps<KeysWarp<H>> warps;
  ForWarps(&warps, [](KeysWarp<H>& warp, int) {
    Clear<H>(warp.dk);
    Clear<H>(warp.dv);
  });
  QueryTiles tiles(call, matrix, first);
  const int end = first + kTile < call.num_keys ? first + kTile : call.num_keys;
  int stage = 0;
  int query = tiles.Next();
  load(query, stage);
  while (query != kNone) {
    const int next = tiles.Next();
    load(next, 1 - stage);
    copies->Wait(1);
    SyncCopies();
    if (scratch->rows[stage].See(first, end)) {
      ForWarps(&warps, [&](KeysWarp<H>& warp, int at) {
        warp.Add(*scratch, at, first, stage, call.scale);
      });
    }
    SyncAttention();
    query = next;
    stage = 1 - stage;
  }
  copies->Wait(0);  // of the keys, which nothing may have read
  ForWarps(&warps, [&](KeysWarp<H>& warp, int at) {
    const int64_t to = (matrix * call.num_keys + first + at) * H;
    WriteRows<H>(call.dk + to, warp.dk, call.scale, call.num_keys - first - at);
    WriteRows<H>(call.dv + to, warp.dv, 1, call.num_keys - first - at);
  });
}

}  // namespace cpd::kernels
