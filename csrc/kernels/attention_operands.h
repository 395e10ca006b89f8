// What the kernels of attention share: their operands, and which rows a block computes. A block has
// four warps of 16 rows.
#pragma once

#include "kernels/head_rows.h"

namespace cpd::kernels {

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

}  // namespace cpd::kernels
