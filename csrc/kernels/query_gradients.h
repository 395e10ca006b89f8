// A block of queries: sums dq, and tells the blocks of keys what they need to know of its rows.
#pragma once

#include "kernels/attention_gradients.h"

namespace cpd::kernels {

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

}  // namespace cpd::kernels
