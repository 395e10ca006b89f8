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
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // addresses that follow from it do not stay in registers
  f(thread);
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

// The lowest bits, up to 64 of them.
CPD_DEVICE uint64_t LowBits(int number) {
  return number >= 64 ? ~uint64_t{0} : (uint64_t{1} << number) - 1;
}

// kTile rows of H elements: panels of 64 columns, whose rows have 128 bytes. The 16-byte parts of a
// row are permuted by its number, so that eight rows of a column are in different banks.
template <int H>
struct alignas(1024) Tile {
  static constexpr int kPanel = 64 * kTile;  // elements

  uint16_t elements[(H + 63) / 64 * kPanel];

  // The eight elements of a row from `column` on.
  CPD_DEVICE const uint16_t* At(int row, int column) const {
    return elements + column / 64 * kPanel + row * 64 + ((column / 8 ^ row) & 7) * 8;
  }
  CPD_DEVICE uint16_t* At(int row, int column) {
    return const_cast<uint16_t*>(static_cast<const Tile*>(this)->At(row, column));
  }

  // Copies rows that are `stride` elements apart, those of the bits `there`; others become zeros
  // and are not read.
  CPD_DEVICE void Copy(AsyncCopies* copies, const uint16_t* first, int stride, uint64_t there) {
    constexpr int kParts = H / 8;  // of 16 bytes
    // Threads of a row: the largest power of 2 that divides the parts, at most 16.
    constexpr int kOfRow = (kParts & -kParts) < 16 ? kParts & -kParts : 16;
    constexpr int kRowsAtOnce = kAttentionThreads / kOfRow;
    static_assert(kRowsAtOnce % 8 == 0 && kTile % kRowsAtOnce == 0, "the same permutation");
    ForAttentionThreads([&](int thread) {
      const int row = thread / kOfRow;
      const uint64_t here = there >> row;
      CPD_UNROLL
      for (int part = 0; part < kParts; part += kOfRow) {
        const int column = (part + thread % kOfRow) * 8;
        const uint16_t* from = first + int64_t{row} * stride + column;
        uint16_t* to = At(row, column);
        CPD_UNROLL
        for (int i = 0; i < kTile; i += kRowsAtOnce) {
          copies->Copy<16>(to + i * 64, from + int64_t{i} * stride, here >> i & 1);
        }
      }
    });
  }

#ifdef CPD_HAS_WARPGROUPS
  // Rows from `first` on, a multiple of 8, and 16 columns: as they are, ...
  CPD_DEVICE uint64_t Rows(int first, int column) const {
    return DescriptorOf(elements + column / 64 * kPanel + first * 64 + column % 64, 16);
  }
  // ... or 16 rows from `first` on, and columns from a multiple of 64 on.
  CPD_DEVICE uint64_t Columns(int first, int column) const {
    return DescriptorOf(elements + column / 64 * kPanel + first * 64,
                        static_cast<int>(sizeof(uint16_t)) * kPanel);
  }
#endif
};

template <>
struct Tile<0> {};

// ---- Products of a warp's 16 rows, inside `Products`.

// sums [16, kColumns] = left y', where y has kColumns rows of a tile, from row `first` on, and
// left_of(k) is the 16 columns of left from 16 k on.
template <typename Element, int kColumns, int H, typename F>
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
      MultiplyAdd<Element>(&sums[n], left, right, 0);
      MultiplyAdd<Element>(&sums[n + 1], left, right, 1);
    }
  }
}

// sums [16, kColumns] = left y', where left lies in registers, ...
template <typename Element, int kColumns, int H>
CPD_DEVICE void MultiplyTransposed(Lanes<Sums>* sums, const Lanes<Four> (&left)[H / 16],
                                   const Tile<H>& y, int first) {
#ifdef CPD_HAS_WARPGROUPS
  CPD_UNROLL
  for (int k = 0; k < H / 16; ++k) {
    MultiplyAsync<Element, kColumns, false>(sums, left[k].value[0], y.Rows(first, 16 * k), k > 0);
  }
#else
  MultiplyByWarps<Element, kColumns>(sums, [&](int k) { return left[k]; }, y, first);
#endif
}

// ... or is the warp's rows of a tile, from row `of_warp` on.
template <typename Element, int kColumns, int H>
CPD_DEVICE void MultiplyTransposed(Lanes<Sums>* sums, const Tile<H>& left,
                                   [[maybe_unused]] int of_warp, const Tile<H>& y, int first) {
#ifdef CPD_HAS_WARPGROUPS
  CPD_UNROLL
  for (int k = 0; k < H / 16; ++k) {
    static_assert(kColumns == 64);
    MultiplyAsync<Element>(sums, left.Rows(0, 16 * k), y.Rows(first, 16 * k), k > 0);
  }
#else
  const auto rows = [&](int k) {
    Lanes<Four> part;
    LoadFour<false>(&part,
                    [&](int lane) { return left.At(of_warp + lane % 16, 16 * k + lane / 16 * 8); });
    return part;
  };
  MultiplyByWarps<Element, kColumns>(sums, rows, y, first);
#endif
}

// p [16, 16 kParts], rounded, as the left of products.
template <typename Element, int kParts>
CPD_DEVICE void Round(Lanes<Four> (&left)[kParts], const Lanes<Sums>* p) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int k = 0; k < kParts; ++k) {
      const float *a = p[2 * k][lane].x, *b = p[2 * k + 1][lane].x;
      left[k][lane] = {{Pack<Element>(a[0], a[1]), Pack<Element>(a[2], a[3]),
                        Pack<Element>(b[0], b[1]), Pack<Element>(b[2], b[3])}};
    }
  });
}

// out [16, H] += left y, where y has the rows of a tile from `first` on.
template <typename Element, int kParts, int H>
CPD_DEVICE void AddProduct(Lanes<Sums>* out, const Lanes<Four> (&left)[kParts], const Tile<H>& y,
                           int first) {
  CPD_UNROLL
  for (int k = 0; k < kParts; ++k) {
#ifdef CPD_HAS_WARPGROUPS
    constexpr int kWide = H / 128 * 128, kHalf = (H - kWide) / 64 * 64, kLast = H - kWide - kHalf;
    const Four& x = left[k].value[0];
    CPD_UNROLL
    for (int n = 0; n < kWide; n += 128) {
      MultiplyAsync<Element, 128, true>(out + n / 8, x, y.Columns(first + 16 * k, n), true);
    }
    if constexpr (kHalf > 0) {
      MultiplyAsync<Element, 64, true>(out + kWide / 8, x, y.Columns(first + 16 * k, kWide), true);
    }
    if constexpr (kLast > 0) {
      constexpr int kFrom = kWide + kHalf;
      MultiplyAsync<Element, kLast, true>(out + kFrom / 8, x, y.Columns(first + 16 * k, kFrom),
                                          true);
    }
#else
    CPD_UNROLL
    for (int n = 0; n < H / 16; ++n) {
      Lanes<Four> right;
      LoadFour<true>(&right, [&](int lane) {
        return y.At(first + 16 * k + lane % 16, 16 * n + lane / 16 * 8);
      });
      MultiplyAdd<Element>(&out[2 * n], left[k], right, 0);
      MultiplyAdd<Element>(&out[2 * n + 1], left[k], right, 1);
    }
#endif
  }
}

}  // namespace cpd::kernels
