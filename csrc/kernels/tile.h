// Rows of matrices in a block's memory, and products with them.
#pragma once

#include "kernels/async_copy.h"
#include "kernels/warpgroup.h"

namespace cpd::kernels {

constexpr int kAttentionWarps = 4, kWarpRows = 16;
constexpr int kTile = kAttentionWarps * kWarpRows;  // rows of a block; keys that it reads at a time
constexpr int kAttentionThreads = 32 * kAttentionWarps;

template <typename F>
CPD_DEVICE void ForAttentionThreads(F f) {
#ifdef __CUDACC__
  f(static_cast<int>(threadIdx.x));
#else
  for (int thread = 0; thread < kAttentionThreads; ++thread) f(thread);
#endif
}

CPD_DEVICE void SyncAttention() {
#ifdef __CUDACC__
  __syncthreads();
#endif  // on the host, one thread runs all phases in turn
}

// After the copies of this thread: what it has copied is there for all threads and tensor cores.
CPD_DEVICE void SyncCopies() {
#ifdef CPD_HAS_WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  SyncAttention();
}

// kTile rows of H elements: panels of 64 columns, whose rows have 128 bytes. The 16-byte parts of a
// row are permuted by its number, so that eight rows of a column are in different banks.
template <int H>
struct alignas(1024) Tile {
  static constexpr int kPanel = 64 * kTile;  // elements

  uint16_t elements[H * kTile];

  // The eight elements of a row from `column` on.
  CPD_DEVICE const uint16_t* At(int row, int column) const {
    return elements + column / 64 * kPanel + row * 64 + ((column / 8 ^ row) & 7) * 8;
  }
  CPD_DEVICE uint16_t* At(int row, int column) {
    return const_cast<uint16_t*>(static_cast<const Tile*>(this)->At(row, column));
  }

  // Copies rows of a matrix from row `first` on; zeros beyond num_rows.
  CPD_DEVICE void Copy(AsyncCopies* copies, const uint16_t* matrix, int first, int num_rows) {
    constexpr int kParts = H / 8, kRowsAtOnce = kAttentionThreads / kParts;
    static_assert(kRowsAtOnce % 8 == 0 && kTile % kRowsAtOnce == 0, "the same permutation");
    ForAttentionThreads([&](int thread) {
      const int row = thread / kParts, column = thread % kParts * 8;
      const uint16_t* from = matrix + int64_t{first + row} * H + column;
      uint16_t* to = At(row, column);
      CPD_UNROLL
      for (int i = 0; i < kTile; i += kRowsAtOnce) {
        copies->Copy<16>(to + i * 64, from + i * H, first + row + i < num_rows);
      }
    });
  }

#ifdef CPD_HAS_WARPGROUPS
  // Rows from `first` on, a multiple of 8, and 16 columns: as they are, ...
  CPD_DEVICE uint64_t Rows(int first, int column) const {
    return DescriptorOf(elements + column / 64 * kPanel + first * 64 + column % 64, 16);
  }
  // ... or 16 rows from `first` on, and all columns.
  CPD_DEVICE uint64_t Columns(int first) const {
    return DescriptorOf(elements + first * 64, static_cast<int>(sizeof(uint16_t)) * kPanel);
  }
#endif
};

// ---- Products of a warp's 16 rows, inside `Products`.

// sums [16, kColumns] = left y', where y has kColumns rows of a tile, from row `first` on, and
// left_of(k) is the 16 columns of left from 16 k on.
template <int kColumns, int H, typename F>
CPD_DEVICE void MultiplyByWarps(Lanes<Sums>* sums, F left_of, const Tile<H>& y, int first) {
  CPD_UNROLL
  for (int k = 0; k < H / 16; ++k) {
    const Lanes<Four> left = left_of(k);
    CPD_UNROLL
    for (int n = 0; n < kColumns / 8; n += 2) {
      if (k == 0) ForLanes([&](int lane) { sums[n][lane] = sums[n + 1][lane] = Sums{}; });
      Lanes<Four> right;
      LoadFour<false>(&right, [&](int lane) {
        return y.At(first + 8 * n + lane / 16 * 8 + lane % 8, 16 * k + lane / 8 % 2 * 8);
      });
      MultiplyAdd(&sums[n], left, right, 0);
      MultiplyAdd(&sums[n + 1], left, right, 1);
    }
  }
}

// sums [16, kColumns] = left y', where left lies in registers, ...
template <int kColumns, int H>
CPD_DEVICE void MultiplyTransposed(Lanes<Sums>* sums, const Lanes<Four> (&left)[H / 16],
                                   const Tile<H>& y, int first) {
#ifdef CPD_HAS_WARPGROUPS
  CPD_UNROLL
  for (int k = 0; k < H / 16; ++k) {
    MultiplyAsync<kColumns, false>(sums, left[k].value[0], y.Rows(first, 16 * k), k > 0);
  }
#else
  MultiplyByWarps<kColumns>(sums, [&](int k) { return left[k]; }, y, first);
#endif
}

// ... or is the warp's rows of a tile, from row `of_warp` on.
template <int kColumns, int H>
CPD_DEVICE void MultiplyTransposed(Lanes<Sums>* sums, const Tile<H>& left,
                                   [[maybe_unused]] int of_warp, const Tile<H>& y, int first) {
#ifdef CPD_HAS_WARPGROUPS
  CPD_UNROLL
  for (int k = 0; k < H / 16; ++k) {
    static_assert(kColumns == 64);
    MultiplyAsync(sums, left.Rows(0, 16 * k), y.Rows(first, 16 * k), k > 0);
  }
#else
  const auto rows = [&](int k) {
    Lanes<Four> part;
    LoadFour<false>(&part,
                    [&](int lane) { return left.At(of_warp + lane % 16, 16 * k + lane / 16 * 8); });
    return part;
  };
  MultiplyByWarps<kColumns>(sums, rows, y, first);
#endif
}

// p [16, 16 kParts], rounded to bfloat16, as the left of products.
template <int kParts>
CPD_DEVICE void Round(Lanes<Four> (&left)[kParts], const Lanes<Sums>* p) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int k = 0; k < kParts; ++k) {
      const float *a = p[2 * k][lane].x, *b = p[2 * k + 1][lane].x;
      left[k][lane] = {
          {PackBf16(a[0], a[1]), PackBf16(a[2], a[3]), PackBf16(b[0], b[1]), PackBf16(b[2], b[3])}};
    }
  });
}

// out [16, H] += left y, where y has the rows of a tile from `first` on.
template <int kParts, int H>
CPD_DEVICE void AddProduct(Lanes<Sums>* out, const Lanes<Four> (&left)[kParts], const Tile<H>& y,
                           int first) {
  CPD_UNROLL
  for (int k = 0; k < kParts; ++k) {
#ifdef CPD_HAS_WARPGROUPS
    MultiplyAsync<H, true>(out, left[k].value[0], y.Columns(first + 16 * k), true);
#else
    CPD_UNROLL
    for (int n = 0; n < H / 16; ++n) {
      Lanes<Four> right;
      LoadFour<true>(&right, [&](int lane) {
        return y.At(first + 16 * k + lane % 16, 16 * n + lane / 16 * 8);
      });
      MultiplyAdd(&out[2 * n], left[k], right, 0);
      MultiplyAdd(&out[2 * n + 1], left[k], right, 1);
    }
#endif
  }
}

}  // namespace cpd::kernels
