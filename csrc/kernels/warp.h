// A warp and its matrices: tensor cores of a GPU or, in tests, a loop over 32 lanes.
//
// Fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix".
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/block.h"
#include "numerics/element.h"

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

}  // namespace cpd::kernels
