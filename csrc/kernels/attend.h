// Attention to one range of keys per query, forward: adds keys to an online softmax.
#pragma once

#include "kernels/key_tiles.h"

namespace cpd::kernels {

// An online softmax of each row: largest logit, sum of exp(logit - peak), likewise times values.
struct AttendCall : AttentionOperands {
  const float *seen_peak, *seen_total, *seen_acc;  // of other keys; or nullptr
  float *peak, *total;                             // [num_matrices, num_rows]
  float* acc;                                      // [num_matrices, num_rows, H]
};

template <int H>
struct AttendScratch {
  KeyStages<H> stages;
  RowNumbers rows;
};

// 16 queries. Logits are in units of log2; a finite first peak keeps rows without keys at 0.
template <int H>
struct AttendWarp {
  Lanes<Four> q[H / 16];
  Lanes<Sums> acc[H / 8];
  Lanes<float> peak[2], total[2];  // of rows lane / 4 and lane / 4 + 8; a lane's part of the total

  CPD_DEVICE void Begin(const AttendCall& call, int64_t first, int num_rows) {
    ReadLeft<H>(q, call.q + first * H, num_rows);
    Clear<H>(acc);
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const bool has_seen = call.seen_peak && row < num_rows;
        const float seen = has_seen ? call.seen_peak[first + row] * kLog2E : -1e30f;
        peak[r][lane] = fmaxf(seen, -1e30f);
        total[r][lane] = has_seen && lane % 4 == 0 ? call.seen_total[first + row] : 0.0f;
        if (!has_seen) continue;
        CPD_UNROLL
        for (int n = 0; n < H / 8; ++n) {
          const float* at = call.seen_acc + (first + row) * H + 8 * n + ColumnOf(lane, 0);
          const FloatPair pair = *reinterpret_cast<const FloatPair*>(at);
          acc[n][lane].x[2 * r] = pair.x[0];
          acc[n][lane].x[2 * r + 1] = pair.x[1];
        }
      }
    });
  }

  // Adds the tile of keys from `first_key` on; `rows`: of the block, of which the warp has those
  // from `of_warp` on.
  CPD_DEVICE void Add(const RowNumbers& rows, int of_warp, int first_key, float scale,
                      const Tile<H>& k, const Tile<H>& v) {
    Lanes<Sums> logits[kTile / 8];
    Products([&] { MultiplyTransposed<kTile>(logits, q, k, 0); }, logits);
    Lanes<float> highest[2];
    const auto scale_logits = [&](auto sees) {
      ForLanes([&](int lane) {
        CPD_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int row = of_warp + lane / 4 + 8 * r;
          const int start = rows.start[row], end = rows.end[row];
          float highest_here = peak[r][lane];
          CPD_UNROLL
          for (int n = 0; n < kTile / 8; ++n) {
            CPD_UNROLL
            for (int i = 0; i < 2; ++i) {
              const int key = first_key + 8 * n + ColumnOf(lane, i);
              float& x = logits[n][lane].x[2 * r + i];
              x = sees(key, start, end) ? x * scale : -INFINITY;
              highest_here = fmaxf(highest_here, x);
            }
          }
          highest[r][lane] = highest_here;
        }
      });
    };
    if (rows.SeeAll<kWarpRows>(of_warp, first_key, first_key + kTile)) {
      scale_logits([](int, int, int) { return true; });
    } else {
      scale_logits([](int key, int start, int end) { return key >= start && key < end; });
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
        for (int n = 0; n < H / 8; ++n) {
          CPD_UNROLL
          for (int i = 0; i < 4; ++i) acc[n][lane].x[i] *= keep[i / 2][lane];
        }
      });
    }
    Lanes<Four> p[kTile / 16];
    Round(p, logits);
    Products([&] { AddProduct(acc, p, v, 0); }, acc);
  }

  CPD_DEVICE void End(const AttendCall& call, int64_t first, int num_rows) {
    WriteRows<H>(call.acc + first * H, acc, 1, num_rows);
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) OverRow(&total[r], [](float x, float y) { return x + y; });
    ForLanes([&](int lane) {
      CPD_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        if (lane % 4 != 0 || row >= num_rows) continue;
        call.peak[first + row] = peak[r][lane] * kLn2;
        call.total[first + row] = total[r][lane];
      }
    });
  }
};

// Block `index` of num_matrices * NumTiles(num_rows).
template <int H>
CPD_DEVICE void Attend(const AttendCall& call, int64_t index, AttendScratch<H>* scratch,
                       AsyncCopies* copies) {
  const int num_tiles = NumTiles(call.num_rows);
  const int64_t matrix = index / num_tiles;
  const int first = static_cast<int>(index % num_tiles) * kTile;
  RowNumbers& rows = scratch->rows;
  rows.Copy(copies, call, matrix, first, nullptr, nullptr);
  copies->Commit();
  const auto of_warp = [&](int at, auto f) {
    f(matrix * call.num_rows + first + at, call.num_rows - first - at);
  };
  Warps<AttendWarp<H>> warps;
  ForWarps(&warps, [&](AttendWarp<H>& warp, int at) {
    of_warp(at, [&](int64_t row, int left) { warp.Begin(call, row, left); });
  });
  copies->Wait(0);
  SyncAttention();
  ForTilesOfKeys<H>(call, matrix, rows, &scratch->stages, copies,
                    [&](int key, const Tile<H>& k, const Tile<H>& v) {
                      ForWarps(&warps, [&](AttendWarp<H>& warp, int at) {
                        warp.Add(rows, at, key, call.scale * kLog2E, k, v);
                      });
                    });
  ForWarps(&warps, [&](AttendWarp<H>& warp, int at) {
    of_warp(at, [&](int64_t row, int left) { warp.End(call, row, left); });
  });
}

}  // namespace cpd::kernels
