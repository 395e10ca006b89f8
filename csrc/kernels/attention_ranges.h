// The keys that a tile of queries sees, and the queries that may see a tile of keys, in the block's
// memory.
#pragma once

#include "kernels/attention_operands.h"

namespace cpd::kernels {

// Keys that all of some rows see: [from, to); none if `to` is not larger.
struct CommonKeys {
  int from, to;
  CPD_DEVICE bool Have(int first, int last) const { return first >= from && last <= to; }
};

// Ranges of rows in the block's memory; those of rows that do not exist are empty.
struct RowRanges {
  int32_t start[kTile], end[kTile];
  int32_t index[kTile];  // if keys have ranges

  CPD_DEVICE void Copy(AsyncCopies* copies, const AttentionOperands& of, int batch, int first) {
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = first + i < of.num_rows;
        const int64_t at = is_there ? int64_t{batch} * of.num_rows + first + i : 0;
        copies->Copy<4>(start + i, of.start + at, is_there);
        copies->Copy<4>(end + i, of.end + at, is_there);
        if (of.index) copies->Copy<4>(index + i, of.index + at, is_there);
      }
    });
  }

  CPD_DEVICE bool Sees(int row, int key) const { return key >= start[row] && key < end[row]; }

  // The keys that kNum rows, from `first` on, have in common.
  template <int kNum>
  CPD_DEVICE CommonKeys Common(int first) const {
    const int from = -SmallestOfWarp([&](int lane) {
      int latest = 0;
      CPD_UNROLL
      for (int row = first + lane; row < first + kNum; row += 32) {
        latest = start[row] > latest ? start[row] : latest;
      }
      return -latest;
    });
    const int to = SmallestOfWarp([&](int lane) {
      int earliest = kNone;
      CPD_UNROLL
      for (int row = first + lane; row < first + kNum; row += 32) {
        earliest = end[row] < earliest ? end[row] : earliest;
      }
      return earliest;
    });
    return {from, to};
  }

  // The first key from `from` on that one of the rows sees; kNone if there is none.
  CPD_DEVICE int FirstKey(int from) const {
    return SmallestOfWarp([&](int lane) {
      int first = kNone;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        const int key = start[row] > from ? start[row] : from;
        if (key < end[row] && key < first) first = key;
      }
      return first;
    });
  }

  // After the last key that one of the rows sees; 0 if there is none.
  CPD_DEVICE int EndOfKeys() const {
    return -SmallestOfWarp([&](int lane) {
      int last = 0;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        if (start[row] < end[row] && end[row] > last) last = end[row];
      }
      return -last;
    });
  }

  // Which of the kTile keys from `first` on one of the rows sees.
  CPD_DEVICE uint64_t UsedKeys(int first) const {
    const auto bits_of = [&](int half) {
      return BitsOfWarp([&](int lane) {
        uint32_t bits = 0;
        CPD_UNROLL
        for (int row = lane; row < kTile; row += 32) {
          const int from = InWord(start[row] - first - 32 * half);
          const int to = InWord(end[row] - first - 32 * half);
          if (from < to) bits |= static_cast<uint32_t>(LowBits(to) & ~LowBits(from));
        }
        return bits;
      });
    };
    const uint64_t low = bits_of(0), high = bits_of(1);
    return low | high << 32;
  }

  // Which rows see any key.
  CPD_DEVICE uint64_t UsedRows() const {
    const auto bits_of = [&](int half) -> uint64_t {
      return LanesWhere([&](int lane) { return start[32 * half + lane] < end[32 * half + lane]; });
    };
    const uint64_t low = bits_of(0), high = bits_of(1);
    return low | high << 32;
  }

  // Of sign * index, over rows that see keys; kNone if there are none.
  CPD_DEVICE int SmallestIndex(int sign) const {
    return SmallestOfWarp([&](int lane) {
      int smallest = kNone;
      CPD_UNROLL
      for (int row = lane; row < kTile; row += 32) {
        const int here = start[row] < end[row] ? sign * index[row] : kNone;
        smallest = here < smallest ? here : smallest;
      }
      return smallest;
    });
  }

 private:
  CPD_DEVICE static int InWord(int bit) { return bit < 0 ? 0 : bit > 32 ? 32 : bit; }
};

// Those of the queries of a block, and what they have in common.
struct QueryRanges : RowRanges {
  CommonKeys of_warp[kAttentionWarps], of_block;
  int32_t first_index, last_index;  // of rows that see keys

  // Finds of_warp and of_block, for all threads; with ranges of keys, also the indices.
  CPD_DEVICE void FindCommon(bool has_index) {
    Warps<char> warps;
    ForWarps(&warps, [&](char&, int at) {
      const CommonKeys here = Common<kWarpRows>(at), all = Common<kTile>(0);
      const int first = has_index ? SmallestIndex(1) : 0, last = has_index ? -SmallestIndex(-1) : 0;
      ForLanes([&](int lane) {
        if (lane == 0) of_warp[at / kWarpRows] = here;
        if (lane == 0 && at == 0) of_block = all, first_index = first, last_index = last;
      });
    });
    SyncAttention();
  }
};

// Which keys from `first` on a row sees: their numbers, which are constants, are compared with two
// registers.
struct SeenColumns {
  int from, to;
  CPD_DEVICE SeenColumns(const RowRanges& rows, int row, int first)
      : from(rows.start[row] - first), to(rows.end[row] - first) {}
  CPD_DEVICE bool Have(int column) const { return column >= from && column < to; }
};

// Ranges of keys in the block's memory; those of keys that do not exist are empty.
struct KeyRanges {
  int32_t first[kTile], end[kTile];

  CPD_DEVICE void Copy(AsyncCopies* copies, const AttentionOperands& of, int batch, int from) {
    ForAttentionThreads([&](int thread) {
      for (int i = thread; i < kTile; i += kAttentionThreads) {
        const bool is_there = from + i < of.num_keys;
        const int64_t at = is_there ? int64_t{batch} * of.num_keys + from + i : 0;
        copies->Copy<4>(first + i, of.first_query + at, is_there);
        copies->Copy<4>(end + i, of.end_query + at, is_there);
      }
    });
  }

  // The queries that may see a key: [Earliest(), Latest()).
  CPD_DEVICE int Earliest() const {
    return Smallest([&](int key) { return first[key]; });
  }
  CPD_DEVICE int Latest() const {
    return -Smallest([&](int key) { return -end[key]; });
  }

  CPD_DEVICE bool Allows(int key, int index) const {
    return index >= first[key] && index < end[key];
  }

 private:
  template <typename F>
  CPD_DEVICE int Smallest(F of_key) const {
    return SmallestOfWarp([&](int lane) {
      int found = kNone;
      CPD_UNROLL
      for (int key = lane; key < kTile; key += 32) {
        const int here = first[key] < end[key] ? of_key(key) : kNone;
        found = here < found ? here : found;
      }
      return found;
    });
  }
};

// Which of the kTile keys from `from` on a query may see whose index is in [first, last].
CPD_DEVICE uint64_t KeysAllowing(const AttentionOperands& of, int batch, int from, int first,
                                 int last) {
  const auto bits_of = [&](int half) -> uint64_t {
    return LanesWhere([&](int lane) {
      const int key = from + 32 * half + lane;
      if (key >= of.num_keys) return false;
      const int64_t at = int64_t{batch} * of.num_keys + key;
      const int earliest = of.first_query[at], end = of.end_query[at];
      return earliest < end && earliest <= last && end > first;
    });
  };
  const uint64_t low = bits_of(0), high = bits_of(1);
  return low | high << 32;
}

}  // namespace cpd::kernels
