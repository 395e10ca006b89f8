// Attention to one range of keys per query, backward. A block of queries sums dq, a block of keys
// dk and dv: nothing is added atomically, and sums have a fixed order.
#pragma once

#include "kernels/key_tiles.h"

namespace cpd::kernels {

constexpr int kStep = 32;  // queries that a block of keys reads at a time

CPD_DEVICE int NumSteps(int num_rows) { return NumTiles(num_rows) * (kTile / kStep); }

struct GradientsCall : AttentionOperands {
  const uint16_t* dout;      // [num_matrices, num_rows, H]
  const float *lse, *delta;  // [num_matrices, num_rows], of the whole softmax: sum of dout out
  int32_t* reach;            // [num_matrices, NumSteps(num_rows), 2]: keys seen in each step
  float* dq;                 // [num_matrices, num_rows, H]
  float *dk, *dv;            // [num_matrices, num_keys, H]
};

// Of [16, 16] logits: x becomes the probabilities, dx the derivatives of the scaled logits. Rows
// are queries from `query` on, and columns keys from `key` on, or the other way around.
template <bool kRowsAreKeys, int kRows>
CPD_DEVICE void Differentiate(Lanes<Sums>* x, Lanes<Sums>* dx, const RowNumbers<kRows>& rows,
                              int query, int key, float scale) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int n = 0; n < 2; ++n) {
      CPD_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = RowOf(lane, i), column = 8 * n + ColumnOf(lane, i);
        const int of_query = query + (kRowsAreKeys ? column : row);
        const int of_key = key + (kRowsAreKeys ? row : column);
        float &p = x[n][lane].x[i], &dp = dx[n][lane].x[i];
        const bool sees = rows.Sees(of_query, of_key);
        p = sees ? exp2f(p * (scale * kLog2E) - rows.lse[of_query] * kLog2E) : 0.0f;
        dp = p * (dp - rows.delta[of_query]);
      }
    }
  });
}

template <int H>
struct QueriesScratch {
  alignas(16) KeyStages<H> stages;
  RowNumbers<kTile> rows;
};

template <int H>
struct QueriesWarp {
  Lanes<Four> q[H / 16], dout[H / 16];
  Lanes<Sums> dq[H / 8];
};

// Tells which keys the steps of a block's queries see: [first, last), empty if none.
CPD_DEVICE void WriteReach(const GradientsCall& call, int64_t matrix, int first,
                           const RowNumbers<kTile>& rows) {
  ForAttentionThreads([&](int thread) {
    if (thread >= kTile / kStep) return;
    int start = kNone, end = 0;
    for (int row = thread * kStep; row < (thread + 1) * kStep; ++row) {
      if (rows.start[row] >= rows.end[row]) continue;
      start = rows.start[row] < start ? rows.start[row] : start;
      end = rows.end[row] > end ? rows.end[row] : end;
    }
    int32_t* to = call.reach + 2 * (matrix * NumSteps(call.num_rows) + first / kStep + thread);
    to[0] = start;
    to[1] = end;
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
  RowNumbers<kTile>& rows = scratch->rows;
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
  WriteReach(call, matrix, first, rows);
  const auto add = [&](int first_key, const uint16_t* k, const uint16_t* v) {
    ForWarps(&warps, [&](QueriesWarp<H>& warp, int at) {
      CPD_UNROLL
      for (int key = 0; key < kTile; key += 16) {
        Lanes<Sums> p[2], dp[2];
        MultiplyTransposed<H>(p, warp.q, k + key * kPitch<H>);
        MultiplyTransposed<H>(dp, warp.dout, v + key * kPitch<H>);
        Differentiate<false>(p, dp, rows, at, first_key + key, call.scale);
        AddProduct<H>(warp.dq, dp, k + key * kPitch<H>);
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
  alignas(16) uint16_t k[kTile * kPitch<H>], v[kTile * kPitch<H>];
  alignas(16) uint16_t q[2][kStep * kPitch<H>], dout[2][kStep * kPitch<H>];
  RowNumbers<kStep> rows[2];
};

template <int H>
struct KeysWarp {
  Lanes<Sums> dk[H / 8], dv[H / 8];

  // Adds 16 queries. Keys and values are read again each time: dk and dv fill the registers.
  CPD_DEVICE void Add(const KeysScratch<H>& scratch, int at, int first_key, int stage, int query,
                      float scale) {
    const uint16_t* q = scratch.q[stage] + query * kPitch<H>;
    const uint16_t* dout = scratch.dout[stage] + query * kPitch<H>;
    Lanes<Sums> p[2], dp[2];
    const auto against = [&](Lanes<Sums>* sums, const uint16_t* x, const uint16_t* y) {
      Lanes<Four> left[H / 16];
      CPD_UNROLL
      for (int n = 0; n < H / 16; ++n) LoadLeft(&left[n], x + at * kPitch<H> + 16 * n, kPitch<H>);
      MultiplyTransposed<H>(sums, left, y);
    };
    against(p, scratch.k, q);
    against(dp, scratch.v, dout);
    Differentiate<true>(p, dp, scratch.rows[stage], query, first_key + at, scale);
    AddProduct<H>(dv, p, dout);
    AddProduct<H>(dk, dp, q);
  }
};

// Finds the steps of queries that see one of the keys [first_key, first_key + kTile), in order.
class StepsOfKeys {
 public:
  CPD_DEVICE StepsOfKeys(const GradientsCall& call, int64_t matrix, int first_key)
      : start_(call.start + matrix * call.num_rows),
        end_(call.end + matrix * call.num_rows),
        reach_(call.reach + 2 * matrix * NumSteps(call.num_rows)),
        num_rows_(call.num_rows),
        first_key_(first_key),
        last_key_(first_key + kTile < call.num_keys ? first_key + kTile : call.num_keys) {}

  // The first query of the next step; kNone after the last one. All lanes of a warp call it.
  CPD_DEVICE int Next() {
    const int num_steps = NumSteps(num_rows_);
    while (true) {
      while (!candidates_) {
        if (group_ >= num_steps) return kNone;
        candidates_ = LanesWhere([&](int lane) {
          const int step = group_ + lane;
          return step < num_steps && Meet(reach_[2 * step], reach_[2 * step + 1]);
        });
        group_ += 32;
      }
      const int query = (group_ - 32 + FirstBit(candidates_)) * kStep;
      candidates_ &= candidates_ - 1;
      const auto sees = [&](int lane) {  // exactly: the reach has holes
        const int row = query + lane;
        return row < num_rows_ && start_[row] < end_[row] && Meet(start_[row], end_[row]);
      };
      if (LanesWhere(sees)) return query;
    }
  }

 private:
  CPD_DEVICE bool Meet(int start, int end) const { return start < last_key_ && end > first_key_; }
  CPD_DEVICE static int FirstBit(uint32_t bits) {
#ifdef __CUDACC__
    return __ffs(static_cast<int>(bits)) - 1;
#else
    return __builtin_ctz(bits);
#endif
  }

  const int32_t *start_, *end_, *reach_;
  int num_rows_, first_key_, last_key_;
  int group_ = 0;  // of steps after those of the candidates
  uint32_t candidates_ = 0;
};

// dk and dv, after the reach. Block `index` of num_matrices * NumTiles(num_keys).
template <int H>
CPD_DEVICE void GradientsOfKeys(const GradientsCall& call, int64_t index, KeysScratch<H>* scratch,
                                AsyncCopies* copies) {
  const int num_tiles = NumTiles(call.num_keys);
  const int64_t matrix = index / num_tiles;
  const int first = static_cast<int>(index % num_tiles) * kTile;
  const int64_t of_matrix = matrix * call.num_rows * H;
  CopyRows<H, kTile>(copies, scratch->k, call.k + matrix * call.num_keys * H, first, call.num_keys);
  CopyRows<H, kTile>(copies, scratch->v, call.v + matrix * call.num_keys * H, first, call.num_keys);
  const auto load = [&](int query, int stage) {
    if (query != kNone) {
      CopyRows<H, kStep>(copies, scratch->q[stage], call.q + of_matrix, query, call.num_rows);
      CopyRows<H, kStep>(copies, scratch->dout[stage], call.dout + of_matrix, query, call.num_rows);
      scratch->rows[stage].Copy(copies, call, matrix, query, call.lse, call.delta);
    }
    copies->Commit();
  };
  Warps<KeysWarp<H>> warps;
  ForWarps(&warps, [](KeysWarp<H>& warp, int) {
    Clear<H>(warp.dk);
    Clear<H>(warp.dv);
  });
  StepsOfKeys steps(call, matrix, first);
  int stage = 0;
  int query = steps.Next();
  load(query, stage);
  while (query != kNone) {
    const int next = steps.Next();
    load(next, 1 - stage);
    copies->Wait(1);
    SyncAttention();
    ForWarps(&warps, [&](KeysWarp<H>& warp, int at) {
      CPD_UNROLL
      for (int i = 0; i < kStep; i += 16) warp.Add(*scratch, at, first, stage, i, call.scale);
    });
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
