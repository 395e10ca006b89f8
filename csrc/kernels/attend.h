// Attention to one range of keys per query, forward: the whole softmax, or a part of it that is
// added to an online softmax.
#pragma once

#include "kernels/key_tiles.h"

namespace cpd::kernels {

// Rows of numbers are [batch, num_heads, num_rows]. An online softmax is, of each row, the largest
// logit (the peak), the sum of exp(logit - peak), and this sum times values.
struct AttendCall : AttentionOperands {
  // Of other keys, perhaps where the results go; nullptr: none.
  const float *seen_peak, *seen_total, *seen_acc;
  float* peak;   // also of a whole softmax; there it may be nullptr, and is -inf without keys
  float* total;  // nullptr: the softmax is whole, and out and lse are results
  float* acc;    // [batch, num_rows, num_heads, Hv]
  float* lse;
  MutableFloats out;  // like acc
  const float* sink;  // [batch, num_heads]: a further logit of a whole softmax; or nullptr
};

template <int H, int Hv>
struct AttendScratch {
  static constexpr bool kHasQueries = H > 192;  // else they are in registers
  KeyStages<H, Hv, (H + Hv > 320 ? 1 : 2)> stages;
  Tile<kHasQueries ? H : 0> q;
  RowRanges rows;
};

// 16 queries. Logits are in units of log2; a finite first peak keeps rows without keys at 0.
template <typename Element, int H, int Hv>
struct AttendWarp {
  static constexpr bool kHasQueries = AttendScratch<H, Hv>::kHasQueries;
  Lanes<Four> q[kHasQueries ? 1 : H / 16];
  Lanes<Sums> acc[Hv / 8];
  Lanes<float> peak[2], total[2];  // of rows lane / 4 and lane / 4 + 8; a lane's part of the total

  // `first`: of the warp's rows.
  CPD_DEVICE void Begin(const AttendCall& call, const TileOfHead& at, int first) {
    if constexpr (!kHasQueries) {
      const auto queries = RowsOf<H>(call.q, at.batch, call.num_rows, call.num_heads, at.head);
      ReadLeft<H>(q, queries, first, call.num_rows);
    }
    Clear<Hv>(acc);
    const auto seen = RowsOf<Hv>(call.seen_acc, at.batch, call.num_rows, call.num_heads, at.head);
    const int64_t numbers = (int64_t{at.batch} * call.num_heads + at.head) * call.num_rows;
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first + lane / 4 + 8 * r;
        const bool has_seen = call.seen_peak && row < call.num_rows;
        peak[r][lane] = has_seen ? fmaxf(call.seen_peak[numbers + row] * kLog2E, -1e30f) : -1e30f;
        total[r][lane] = has_seen && lane % 4 == 0 ? call.seen_total[numbers + row] : 0.0f;
        if (!has_seen) continue;
        CPD_UNROLL
        for (int n = 0; n < Hv / 8; ++n) {
          const FloatPair pair =
              *reinterpret_cast<const FloatPair*>(seen.Row(row) + 8 * n + ColumnOf(lane, 0));
          acc[n][lane].x[2 * r] = pair.x[0];
          acc[n][lane].x[2 * r + 1] = pair.x[1];
        }
      }
    });
  }

  // Adds the tile of keys from `first_key` on. The warp has the rows of the block from `of_warp`
  // on.
  CPD_DEVICE void Add(const AttendCall& call, const AttendScratch<H, Hv>& scratch, int of_warp,
                      int first_key, const Tile<H>& k, const Tile<Hv>& v, const KeyRanges& keys) {
    const RowRanges& rows = scratch.rows;
    Lanes<Sums> logits[kTile / 8];
    Products(
        [&] {
          if constexpr (kHasQueries) {
            MultiplyTransposed<Element, kTile>(logits, scratch.q, of_warp, k, 0);
          } else {
            MultiplyTransposed<Element, kTile>(logits, q, k, 0);
          }
        },
        logits);
    float scale = call.scale * kLog2E;
    if (call.IsSpecial()) {
      scale = 1;
      ForLanes([&](int lane) {
        CPD_UNROLL
        for (int n = 0; n < kTile / 8; ++n) {
          CPD_UNROLL
          for (int i = 0; i < 4; ++i) {
            float& x = logits[n][lane].x[i];
            x = call.soft_cap > 0 ? Cap(x * call.scale, call.soft_cap).logit
                                  : x * (call.scale * kLog2E);
            const int key = 8 * n + ColumnOf(lane, i), row = of_warp + RowOf(lane, i);
            if (call.index && !keys.Allows(key, rows.index[row])) x = -INFINITY;
          }
        }
      });
    }
    Lanes<float> highest[2];
    const auto scale_logits = [&](auto sees) {
      ForLanes([&](int lane) {
        CPD_UNROLL
        for (int r = 0; r < 2; ++r) {
          const SeenColumns seen(rows, of_warp + RowOf(lane, 2 * r), first_key + ColumnOf(lane, 0));
          float highest_here = peak[r][lane];
          CPD_UNROLL
          for (int n = 0; n < kTile / 8; ++n) {
            CPD_UNROLL
            for (int i = 0; i < 2; ++i) {
              float& x = logits[n][lane].x[2 * r + i];
              x = sees(seen, 8 * n + i) ? x * scale : -INFINITY;
              highest_here = fmaxf(highest_here, x);
            }
          }
          highest[r][lane] = highest_here;
        }
      });
    };
    if (rows.of_warp[of_warp / kWarpRows].Have(first_key, first_key + kTile)) {
      scale_logits([](const SeenColumns&, int) { return true; });
    } else {
      scale_logits([](const SeenColumns& seen, int column) { return seen.Have(column); });
    }
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) {
      OverRow(&highest[r], [](float x, float y) { return fmaxf(x, y); });
    }
    Lanes<float> keep[2];
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int r = 0; r < 2; ++r) {
        keep[r][lane] = Exp2(peak[r][lane] - highest[r][lane]);
        peak[r][lane] = highest[r][lane];
        float sum = total[r][lane] * keep[r][lane];
        CPD_UNROLL
        for (int n = 0; n < kTile / 8; ++n) {
          CPD_UNROLL
          for (int i = 2 * r; i < 2 * r + 2; ++i) {
            float& x = logits[n][lane].x[i];
            x = Exp2(x - peak[r][lane]);
            sum += x;
          }
        }
        total[r][lane] = sum;
      }
    });
    if (LanesWhere([&](int lane) { return keep[0][lane] != 1 || keep[1][lane] != 1; })) {
      ForLanes([&](int lane) {
        CPD_UNROLL
        for (int n = 0; n < Hv / 8; ++n) {
          CPD_UNROLL
          for (int i = 0; i < 4; ++i) acc[n][lane].x[i] *= keep[i / 2][lane];
        }
      });
    }
    Lanes<Four> p[kTile / 16];
    Round<Element>(p, logits);
    Products([&] { AddProduct<Element>(acc, p, v, 0); }, acc);
  }

  CPD_DEVICE void End(const AttendCall& call, const TileOfHead& at, int first) {
    const int64_t numbers = (int64_t{at.batch} * call.num_heads + at.head) * call.num_rows;
    const auto for_rows = [&](auto f) {  // f(lane, r, the row's number)
      ForLanes([&](int lane) {
        CPD_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int row = first + lane / 4 + 8 * r;
          if (lane % 4 == 0 && row < call.num_rows) f(lane, r, numbers + row);
        }
      });
    };
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) OverRow(&total[r], [](float x, float y) { return x + y; });
    if (call.total) {
      const auto all = RowsOf<Hv>(call.acc, at.batch, call.num_rows, call.num_heads, at.head);
      WriteRows<Hv>(all, false, acc, [](int, int) { return 1.0f; }, first, call.num_rows);
      for_rows([&](int lane, int r, int64_t row) {
        call.peak[row] = peak[r][lane] * kLn2;
        call.total[row] = total[r][lane];
      });
      return;
    }
    if (call.peak) {
      for_rows([&](int lane, int r, int64_t row) {
        call.peak[row] = total[r][lane] == 0 ? -INFINITY : peak[r][lane] * kLn2;
      });
    }
    const float sink = call.sink ? call.sink[at.batch * call.num_heads + at.head] * kLog2E : 0;
    Lanes<float> factor[2];
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int r = 0; r < 2; ++r) {
        float &sum = total[r][lane], &lse = peak[r][lane];
        factor[r][lane] = sum == 0 ? 0.0f : 1 / sum;
        lse = sum == 0 ? -INFINITY : lse + log2f(sum);
        if (!call.sink || sum == 0) continue;
        const float more = sink - lse, ratio = Exp2(-fabsf(more));
        factor[r][lane] *= (more > 0 ? ratio : 1.0f) / (1 + ratio);
        lse = fmaxf(lse, sink) + log2f(1 + ratio);
      }
    });
    for_rows([&](int lane, int r, int64_t row) { call.lse[row] = peak[r][lane] * kLn2; });
    WriteRows<Element, Hv>(
        call.out, at.batch, call.num_rows, call.num_heads, at.head, acc,
        [&](int lane, int r) { return factor[r][lane]; }, first);
  }
};

// Block `index` of batch * num_heads * NumTiles(num_rows).
template <typename Element, int H, int Hv>
CPD_DEVICE void Attend(const AttendCall& call, int index, AttendScratch<H, Hv>* scratch,
                       AsyncCopies* copies) {
  const TileOfHead tile = TileOfHead::OfQueries(call, index);
  RowRanges& rows = scratch->rows;
  rows.Copy(copies, call, tile.batch, tile.first);
  if constexpr (AttendScratch<H, Hv>::kHasQueries) {
    const auto q = RowsOf<H>(call.q, tile.batch, call.num_rows, call.num_heads, tile.head);
    scratch->q.Copy(copies, q.Row(tile.first), q.stride, LowBits(call.num_rows - tile.first));
  }
  copies->Commit();
  using Warp = AttendWarp<Element, H, Hv>;
  Warps<Warp> warps;
  ForWarps(&warps, [&](Warp& warp, int at) { warp.Begin(call, tile, tile.first + at); });
  copies->Wait(0);
  SyncCopies();
  rows.FindCommon(call.index);
  ForTilesOfKeys(call, tile, rows, &scratch->stages, copies,
                 [&](int key, const Tile<H>& k, const Tile<Hv>& v, const KeyRanges& keys) {
                   ForWarps(&warps, [&](Warp& warp, int at) {
                     warp.Add(call, *scratch, at, key, k, v, keys);
                   });
                 });
  const TileOfHead done = TileOfHead::OfQueries(call, Again(index));
  ForWarps(&warps, [&](Warp& warp, int at) { warp.End(call, done, done.first + at); });
}

}  // namespace cpd::kernels
