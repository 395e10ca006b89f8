// Rows of one head in global memory: read as the left of products, and written.
#pragma once

#include "kernels/tile.h"

namespace cpd::kernels {

// Rows of one head in a dense array [batch, num_rows, num_heads, size].
template <typename T>
struct HeadRows {
  T* first;
  int stride;  // elements from one row to the next

  CPD_DEVICE T* Row(int row) const { return first + int64_t{row} * stride; }
};

template <int kSize, typename T>
CPD_DEVICE HeadRows<T> RowsOf(T* array, int batch, int num_rows, int num_heads, int head) {
  return {array + (int64_t{batch} * num_rows * num_heads + head) * kSize, num_heads * kSize};
}

// An array like this of float, or of BF16 or F16.
struct Floats {
  const void* data;
  bool is_wide;
};
struct MutableFloats {
  void* data;
  bool is_wide;
  bool adds = false;  // to what it holds; it is wide then
};

// left [16, H] of a product, from row `first` on; rows beyond num_rows are zero.
template <int H>
CPD_DEVICE void ReadLeft(Lanes<Four>* left, const HeadRows<const uint16_t>& rows, int first,
                         int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane / 4 + 8 * i;
      const uint16_t* at = rows.Row(row) + lane % 4 * 2;
      CPD_UNROLL
      for (int k = 0; k < H / 16; ++k) {
        left[k][lane].pairs[i] = row < num_rows ? PairAt(at + 16 * k) : 0;
        left[k][lane].pairs[i + 2] = row < num_rows ? PairAt(at + 16 * k + 8) : 0;
      }
    }
  });
}

template <int H>
CPD_DEVICE void Clear(Lanes<Sums>* out) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int n = 0; n < H / 8; ++n) out[n][lane] = Sums{};
  });
}

struct alignas(8) FloatPair {
  float x[2];
};
struct alignas(8) FourElements {
  uint32_t pairs[2];
};

// Writes x [16, H] times a factor of each row, from row `first` on, up to num_rows; or adds it.
template <int H, typename F>
CPD_DEVICE void WriteRows(const HeadRows<float>& to, bool adds, const Lanes<Sums>* x, F factor_of,
                          int first, int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + lane / 4 + 8 * r;
      if (row >= num_rows) continue;
      const float factor = factor_of(lane, r);
      CPD_UNROLL
      for (int n = 0; n < H / 8; ++n) {
        const float* pair = x[n][lane].x + 2 * r;
        auto* at = reinterpret_cast<FloatPair*>(to.Row(row) + 8 * n + ColumnOf(lane, 0));
        const FloatPair before = adds ? *at : FloatPair{};
        *at = {{before.x[0] + pair[0] * factor, before.x[1] + pair[1] * factor}};
      }
    }
  });
}

// Likewise rounded. Neighbours swap pairs, so that a lane writes four elements that are contiguous,
// and four lanes write 32 bytes.
template <typename Element, int H, typename F>
CPD_DEVICE void WriteRows(const HeadRows<uint16_t>& to, const Lanes<Sums>* x, F factor_of,
                          int first, int num_rows) {
  CPD_UNROLL
  for (int r = 0; r < 2; ++r) {
    CPD_UNROLL
    for (int n = 0; n < H / 8; n += 2) {
      Lanes<uint32_t> kept, sent;
      ForLanes([&](int lane) {
        const float factor = factor_of(lane, r);
        const float *a = x[n][lane].x + 2 * r, *b = x[n + 1][lane].x + 2 * r;
        const uint32_t low = Pack<Element>(a[0] * factor, a[1] * factor);
        const uint32_t high = Pack<Element>(b[0] * factor, b[1] * factor);
        kept[lane] = lane % 2 ? high : low;
        sent[lane] = lane % 2 ? low : high;
      });
      const Lanes<uint32_t> got = OfNeighbours(sent);
      ForLanes([&](int lane) {
        const int row = first + lane / 4 + 8 * r;
        if (row >= num_rows) return;
        uint16_t* at = to.Row(row) + 8 * (n + lane % 2) + lane % 4 / 2 * 4;
        *reinterpret_cast<FourElements*>(at) = lane % 2 ? FourElements{{got[lane], kept[lane]}}
                                                        : FourElements{{kept[lane], got[lane]}};
      });
    }
  }
}

// Likewise into one head of an array of either type.
template <typename Element, int H, typename F>
CPD_DEVICE void WriteRows(const MutableFloats& to, int batch, int num_rows, int num_heads, int head,
                          const Lanes<Sums>* x, F factor_of, int first) {
  if (to.is_wide) {
    const auto rows = RowsOf<H>(static_cast<float*>(to.data), batch, num_rows, num_heads, head);
    WriteRows<H>(rows, to.adds, x, factor_of, first, num_rows);
  } else {
    const auto rows = RowsOf<H>(static_cast<uint16_t*>(to.data), batch, num_rows, num_heads, head);
    WriteRows<Element, H>(rows, x, factor_of, first, num_rows);
  }
}

// Sums of products [16] of rows [16, H] of two arrays, of which the first has elements.
template <typename Element, int H, typename T>
CPD_DEVICE void Dot(Lanes<float> (&sums)[2], const HeadRows<const uint16_t>& left,
                    const HeadRows<T>& rows, int first, int num_rows) {
  ForLanes([&](int lane) {
    CPD_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first + lane / 4 + 8 * r;
      float sum = 0;
      if (row < num_rows) {
        const T* at = rows.Row(row) + lane % 4 * 2;
        const uint16_t* of_left = left.Row(row) + lane % 4 * 2;
        CPD_UNROLL
        for (int k = 0; k < H / 16; ++k) {
          CPD_UNROLL
          for (int half = 0; half < 2; ++half) {
            const uint32_t pair = PairAt(of_left + 16 * k + 8 * half);
            const T* two = at + 16 * k + 8 * half;
            float x[2];
            if constexpr (sizeof(T) == 2) {
              const uint32_t bits = PairAt(two);
              x[0] = Unpack<Element>(bits, 0), x[1] = Unpack<Element>(bits, 1);
            } else {
              const FloatPair floats = *reinterpret_cast<const FloatPair*>(two);
              x[0] = floats.x[0], x[1] = floats.x[1];
            }
            sum += Unpack<Element>(pair, 0) * x[0] + Unpack<Element>(pair, 1) * x[1];
          }
        }
      }
      sums[r][lane] = sum;
    }
  });
  CPD_UNROLL
  for (int r = 0; r < 2; ++r) OverRow(&sums[r], [](float x, float y) { return x + y; });
}

}  // namespace cpd::kernels
