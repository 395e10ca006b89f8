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

}  // namespace cpd::kernels
