// The tiles of keys that the queries of a block attend to.
#pragma once

#include "kernels/attention_ranges.h"

namespace cpd::kernels {

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
                               const QueryRanges& rows, KeyStages<H, Hv, kStages>* stages,
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
