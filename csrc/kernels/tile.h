// A warp and its matrices: tensor cores of a GPU or, in tests, a loop over 32 lanes.
//
// Fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix".
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/block.h"
#include "numerics/element.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CPD_HAS_WARPGROUPS
#endif
#ifdef __CUDACC__
#include <cuda_pipeline.h>
#else
#include <deque>
#include <functional>
#include <vector>
#endif

namespace cpd::kernels {

#ifdef __CUDACC__
constexpr int kLanesHere = 1;
#else
constexpr int kLanesHere = 32;
#endif

// A variable of every lane: one on a GPU, all 32 on the host.
template <typename T>
struct Lanes {
  T value[kLanesHere];
  CPD_DEVICE T& operator[](int lane) { return value[lane % kLanesHere]; }
  CPD_DEVICE const T& operator[](int lane) const { return value[lane % kLanesHere]; }
};

template <typename F>
CPD_DEVICE void ForLanes(F f) {
#ifdef __CUDACC__
  f(static_cast<int>(threadIdx.x % 32));
#else
  for (int lane = 0; lane < 32; ++lane) f(lane);
#endif
}

// The bits of two elements, BF16 or F16, rounded to nearest even. `low` comes first in memory.
template <typename Element>
CPD_DEVICE uint32_t Pack(float low, float high) {
#ifdef __CUDACC__
  uint32_t pair;
  if constexpr (std::is_same_v<Element, BF16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return Element::Round(low).bits | uint32_t{Element::Round(high).bits} << 16;
#endif
}

// Element i of two.
template <typename Element>
CPD_DEVICE float Unpack(uint32_t pair, int i) {
#ifdef __CUDACC__
  if constexpr (std::is_same_v<Element, F16>) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(pair >> 16 * i)));
    return x;
  }
#endif
  return Element{static_cast<uint16_t>(pair >> 16 * i)};
}

// 2^x; 0 instead of a result below 2^-126.
CPD_DEVICE float Exp2(float x) {
#ifdef __CUDACC__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}

CPD_DEVICE float Tanh(float x) {
#ifdef __CUDACC__
  return 1 - __fdividef(2, 1 + Exp2(2.885390081777927f * x));  // e^2x; tanh.approx has 11 bits
#else
  return tanhf(x);
#endif
}

CPD_DEVICE uint32_t PairAt(const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); }

// A lane's part of four 8 x 8 matrices of elements, two neighbours of one row of each: of one
// 16 x 16 matrix on the left of a product, or of two 16 x 8 matrices on the right.
struct Four {
  uint32_t pairs[4];
};

// A lane's part of a 16 x 8 result: of rows lane / 4 and lane / 4 + 8, two neighbours each.
struct Sums {
  float x[4];
};
// Where element i of a lane's result is.
CPD_DEVICE int RowOf(int lane, int i) { return lane / 4 + i / 2 * 8; }
CPD_DEVICE int ColumnOf(int lane, int i) { return lane % 4 * 2 + i % 2; }

// Reads four matrices from the block's memory. Lane l names row l % 8 of matrix l / 8; rows have 8
// elements and are aligned to 16 bytes. Transposed: the neighbours are of one column.
template <bool kTransposed, typename F>
CPD_DEVICE void LoadFour(Lanes<Four>* to, F row_of) {
#ifdef __CUDACC__
  const auto row = static_cast<uint32_t>(__cvta_generic_to_shared(row_of(threadIdx.x % 32)));
  uint32_t* p = to->value[0].pairs;
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(p[0]), "=r"(p[1]), "=r"(p[2]), "=r"(p[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(p[0]), "=r"(p[1]), "=r"(p[2]), "=r"(p[3])
                 : "r"(row)
                 : "memory");
  }
#else
  const uint16_t* rows[32];
  for (int lane = 0; lane < 32; ++lane) rows[lane] = row_of(lane);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const uint16_t* const* matrix = rows + 8 * m;
      const uint16_t low = kTransposed ? matrix[t][g] : matrix[g][t];
      const uint16_t high = kTransposed ? matrix[t + 1][g] : matrix[g][t + 1];
      (*to)[lane].pairs[m] = low | uint32_t{high} << 16;
    }
  }
#endif
}

// sums += left right, where `half` names one of the two matrices in `right`.
template <typename Element>
CPD_DEVICE void MultiplyAdd(Lanes<Sums>* sums, const Lanes<Four>& left, const Lanes<Four>& right,
                            int half) {
#ifdef __CUDACC__
  float* c = sums->value[0].x;
  const uint32_t *a = left.value[0].pairs, *b = right.value[0].pairs + 2 * half;
#define CPD_MMA(type)                                           \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type    \
      ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<Element, BF16>) {
    CPD_MMA("bf16");
  } else {
    CPD_MMA("f16");
  }
#undef CPD_MMA
#else
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 2; ++i) {
      const int g = lane / 4, k = lane % 4 * 2 + i;
      for (int r = 0; r < 4; ++r) {
        a[g + r % 2 * 8][k + r / 2 * 8] = Unpack<Element>(left[lane].pairs[r], i);
      }
      for (int r = 0; r < 2; ++r)
        b[k + 8 * r][g] = Unpack<Element>(right[lane].pairs[2 * half + r], i);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float& sum = (*sums)[lane].x[i];
      for (int k = 0; k < 16; ++k) sum += a[RowOf(lane, i)][k] * b[k][ColumnOf(lane, i)];
    }
  }
#endif
}

// Combines a value with those of the other three lanes of its row.
template <typename F>
CPD_DEVICE void OverRow(Lanes<float>* x, F f) {
  CPD_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) {
#ifdef __CUDACC__
    x->value[0] = f(x->value[0], __shfl_xor_sync(~0u, x->value[0], distance));
#else
    const Lanes<float> old = *x;
    for (int lane = 0; lane < 32; ++lane) (*x)[lane] = f(old[lane], old[lane ^ distance]);
#endif
  }
}

// Swaps values with the neighbour, whose number differs in the last bit.
CPD_DEVICE Lanes<uint32_t> OfNeighbours(const Lanes<uint32_t>& x) {
  Lanes<uint32_t> y;
#ifdef __CUDACC__
  y.value[0] = __shfl_xor_sync(~0u, x.value[0], 1);
#else
  for (int lane = 0; lane < 32; ++lane) y[lane] = x[lane ^ 1];
#endif
  return y;
}

// The smallest of f(lane), on every lane.
template <typename F>
CPD_DEVICE int SmallestOfWarp(F f) {
#ifdef __CUDACC__
  return __reduce_min_sync(~0u, f(static_cast<int>(threadIdx.x % 32)));
#else
  int smallest = f(0);
  for (int lane = 1; lane < 32; ++lane) smallest = f(lane) < smallest ? f(lane) : smallest;
  return smallest;
#endif
}

// The bits that are set in one f(lane) at least, on every lane.
template <typename F>
CPD_DEVICE uint32_t BitsOfWarp(F f) {
#ifdef __CUDACC__
  return __reduce_or_sync(~0u, f(static_cast<int>(threadIdx.x % 32)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= f(lane);
  return bits;
#endif
}

// The lanes for which f(lane) is true, as bits.
template <typename F>
CPD_DEVICE uint32_t LanesWhere(F f) {
#ifdef __CUDACC__
  return __ballot_sync(~0u, f(static_cast<int>(threadIdx.x % 32)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= uint32_t{f(lane)} << lane;
  return bits;
#endif
}

// ---- Matrix products of a warpgroup: the four warps of an attention block, with 16 rows of the
// left matrix each. Tensor cores of compute capability 9.0 read the block's memory themselves; only
// code for sm_90a can use this. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
// Instructions".

#ifdef CPD_HAS_WARPGROUPS
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

#ifdef CPD_HAS_WARPGROUPS

// Names a matrix in the block's memory: groups of 8 rows of 128 bytes, swizzled, which follow one
// another. `panel_bytes`: from 64 columns to the next 64.
CPD_DEVICE uint64_t DescriptorOf(const uint16_t* matrix, int panel_bytes) {
  constexpr uint64_t kGroupBytes = 1024, kSwizzled = uint64_t{1} << 62;  // by 128 bytes
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(matrix));
  return address >> 4 | static_cast<uint64_t>(panel_bytes >> 4) << 16 | kGroupBytes >> 4 << 32 |
         kSwizzled;
}

#define CPD_SUMS(i)                                                             \
  "+f"(s[i].value[0].x[0]), "+f"(s[i].value[0].x[1]), "+f"(s[i].value[0].x[2]), \
      "+f"(s[i].value[0].x[3])
#define CPD_SUMS4(i) CPD_SUMS(i), CPD_SUMS(i + 1), CPD_SUMS(i + 2), CPD_SUMS(i + 3)
#define CPD_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define CPD_32 CPD_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CPD_64                                                                        \
  CPD_32                                                                              \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CPD_WGMMA(n, type, sums, adds)           \
  "{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds \
  ", 0;\n"                                       \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" sums "}, "
#define CPD_LEFT \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"(int{adds}), "n"(int{kTransposed})
// The left matrix lies in registers, ...
#define CPD_MULTIPLY_REGISTERS(type)                                                        \
  if constexpr (kColumns == 32) {                                                           \
    asm volatile(                                                                           \
        CPD_WGMMA("32", type, CPD_16, "%21") "{%16,%17,%18,%19}, %20, adds, 1, 1, %22;\n}"  \
        : CPD_SUMS4(0)                                                                      \
        : CPD_LEFT);                                                                        \
  } else if constexpr (kColumns == 64) {                                                    \
    asm volatile(                                                                           \
        CPD_WGMMA("64", type, CPD_32, "%37") "{%32,%33,%34,%35}, %36, adds, 1, 1, %38;\n}"  \
        : CPD_SUMS4(0), CPD_SUMS4(4)                                                        \
        : CPD_LEFT);                                                                        \
  } else {                                                                                  \
    asm volatile(                                                                           \
        CPD_WGMMA("128", type, CPD_64, "%69") "{%64,%65,%66,%67}, %68, adds, 1, 1, %70;\n}" \
        : CPD_SUMS4(0), CPD_SUMS4(4), CPD_SUMS4(8), CPD_SUMS4(12)                           \
        : CPD_LEFT);                                                                        \
  }
// ... or in the block's memory.
#define CPD_MULTIPLY_MEMORY(type)                                                    \
  asm volatile(CPD_WGMMA("64", type, CPD_32, "%34") "%32, %33, adds, 1, 1, 0, 0;\n}" \
               : CPD_SUMS4(0), CPD_SUMS4(4)                                          \
               : "l"(left), "l"(right), "r"(int{adds}))

// s [64, kColumns] = left right, or += if it `adds`: 16 columns of the left matrix, which lies in
// registers or, for 64 columns, in the block's memory. Transposed: the columns of the right matrix
// are contiguous.
template <typename Element, int kColumns, bool kTransposed>
CPD_DEVICE void MultiplyAsync(Lanes<Sums>* s, const Four& left, uint64_t right, bool adds) {
  const uint32_t* a = left.pairs;
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128);
  if constexpr (std::is_same_v<Element, BF16>) {
    CPD_MULTIPLY_REGISTERS("bf16")
  } else {
    CPD_MULTIPLY_REGISTERS("f16")
  }
}
template <typename Element>
CPD_DEVICE void MultiplyAsync(Lanes<Sums>* s, uint64_t left, uint64_t right, bool adds) {
  if constexpr (std::is_same_v<Element, BF16>) {
    CPD_MULTIPLY_MEMORY("bf16");
  } else {
    CPD_MULTIPLY_MEMORY("f16");
  }
}

#undef CPD_SUMS
#undef CPD_SUMS4
#undef CPD_16
#undef CPD_32
#undef CPD_64
#undef CPD_WGMMA
#undef CPD_LEFT
#undef CPD_MULTIPLY_REGISTERS
#undef CPD_MULTIPLY_MEMORY

// Keeps accesses of the sums on this side of what is asynchronous.
template <int kNum>
CPD_DEVICE void Hold(Lanes<Sums> (&sums)[kNum]) {
  CPD_UNROLL
  for (int n = 0; n < kNum; ++n) {
    CPD_UNROLL
    for (float& x : sums[n].value[0].x) asm volatile("" : "+f"(x)::"memory");
  }
}

#endif

// Calls multiply(), whose products go into `sums`. All threads of a block call it.
template <typename F, typename... Arrays>
CPD_DEVICE void Products(F multiply, [[maybe_unused]] Arrays&... sums) {
#ifdef CPD_HAS_WARPGROUPS
  (Hold(sums), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply();
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  (Hold(sums), ...);
#else
  multiply();
#endif
}

// ---- Copies into a block's memory that run beside its arithmetic, in groups.

class AsyncCopies {
 public:
  // kBytes: 4, 8 or 16. Writes zeros if there is nothing to copy; `from` is not read then.
  template <int kBytes>
  CPD_DEVICE void Copy(void* to, const void* from, bool is_there) {
#ifdef __CUDACC__
    __pipeline_memcpy_async(to, from, kBytes, is_there ? 0 : kBytes);
#else
    const auto copy = [=] {
      std::memset(to, 0, kBytes);
      if (is_there) std::memcpy(to, from, kBytes);
    };
    is_early_ ? copy() : group_.push_back(copy);
#endif
  }

  // Ends a group, which may be empty.
  CPD_DEVICE void Commit() {
#ifdef __CUDACC__
    __pipeline_commit();
#else
    groups_.push_back(std::move(group_));
    group_.clear();
#endif
  }

  // Waits for all groups but the last `left`, of this thread; a Sync must follow.
  CPD_DEVICE void Wait(int left) {
#ifdef __CUDACC__
    __pipeline_wait_prior(left);
#else
    for (; groups_.size() > static_cast<size_t>(left); groups_.pop_front()) {
      for (const auto& copy : groups_.front()) copy();
    }
#endif
  }

#ifndef __CUDACC__
  // A copy runs as early as a GPU may run it, or as late.
  explicit AsyncCopies(bool is_early) : is_early_(is_early) {}

 private:
  bool is_early_;
  std::vector<std::function<void()>> group_;
  std::deque<std::vector<std::function<void()>>> groups_;
#endif
};

// ---- Rows of matrices in a block's memory, and products with them.

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
