// Flat copies by one block, with the widest vectors that the alignment of source and destinations
// allows.
#pragma once

#include <cstdint>

#include "kernels/block.h"
#include "numerics/element.h"

namespace cpd::kernels {

// Destinations of one read.
constexpr int kMulticast = 8;

struct alignas(16) Vector16 {
  uint32_t words[4];
};

// Neighbouring elements, which a thread loads or stores by up to 16 bytes at once.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Elements {
  T items[N];
};

// bytes = head, then `count` vectors of `width` bytes, then tail; head and tail are shorter than
// `width`.
struct Cut {
  int width;
  int64_t head, count, tail;
};

// `apart`: the differences between addresses, or-ed together.
CPD_HOST_DEVICE inline Cut CutCopy(uint64_t from, uint64_t apart, int64_t bytes) {
  int width = 16;
  while (apart & (width - 1)) width /= 2;
  int64_t head = (0 - from) & (width - 1);
  if (head > bytes) head = bytes;
  const int64_t rest = bytes - head;
  return {width, head, rest / width, rest % width};
}

// Copies `count` vectors of one width, starting at offset `begin`.
template <typename V>
CPD_DEVICE void CopyEach(const Block& block, const char* from, char* const* to, int num_to,
                         int64_t begin, int64_t count) {
  const V* in = reinterpret_cast<const V*>(from + begin);
  CPD_NO_UNROLL
  for (int64_t i = block.thread; i < count; i += block.num_threads) {
    const V value = in[i];
    CPD_NO_UNROLL
    for (int r = 0; r < num_to; ++r) reinterpret_cast<V*>(Global(to[r]) + begin)[i] = value;
  }
}

// Reads of a thread that are in flight at once.
constexpr int kInFlight = 4;
// Bytes that a block of a GPU copies in one step.
constexpr int64_t kStepBytes = int64_t{16} * kInFlight * kMaxThreads;

// Copies those of 16 bytes, with four reads of every thread in flight. The last step is predicated.
CPD_DEVICE void CopyFours(const Block& block, const char* from, char* const* to, int num_to,
                          int64_t begin, int64_t count) {
  const Vector16* in = reinterpret_cast<const Vector16*>(from + begin);
  const int64_t step = block.num_threads;
  int64_t i = block.thread;
  CPD_NO_UNROLL
  for (; i + 3 * step < count; i += 4 * step) {
    const Vector16 a = in[i], b = in[i + step], c = in[i + 2 * step], d = in[i + 3 * step];
    CPD_NO_UNROLL
    for (int r = 0; r < num_to; ++r) {
      Vector16* out = reinterpret_cast<Vector16*>(Global(to[r]) + begin) + i;
      out[0] = a;
      out[step] = b;
      out[2 * step] = c;
      out[3 * step] = d;
    }
  }
  if (i >= count) return;
  const bool has_b = i + step < count, has_c = i + 2 * step < count;
  Vector16 b, c;
  const Vector16 a = in[i];
  if (has_b) b = in[i + step];
  if (has_c) c = in[i + 2 * step];
  CPD_NO_UNROLL
  for (int r = 0; r < num_to; ++r) {
    Vector16* out = reinterpret_cast<Vector16*>(Global(to[r]) + begin) + i;
    out[0] = a;
    if (has_b) out[step] = b;
    if (has_c) out[2 * step] = c;
  }
}

// Copies `bytes` to each of `num_to` destinations. `to` may be in the block's scratch.
CPD_DEVICE void Copy(const Block& block, const char* from, char* const* to, int num_to,
                     int64_t bytes) {
  const auto address = reinterpret_cast<uint64_t>(from);
  uint64_t apart = 0;
  CPD_NO_UNROLL
  for (int r = 0; r < num_to; ++r) apart |= reinterpret_cast<uint64_t>(to[r]) - address;
  const Cut cut = CutCopy(address, apart, bytes);
  if (cut.width == 16) {
    CopyFours(block, from, to, num_to, cut.head, cut.count);
  } else if (cut.width == 8) {
    CopyEach<uint64_t>(block, from, to, num_to, cut.head, cut.count);
  } else if (cut.width == 4) {
    CopyEach<uint32_t>(block, from, to, num_to, cut.head, cut.count);
  } else if (cut.width == 2) {
    CopyEach<uint16_t>(block, from, to, num_to, cut.head, cut.count);
  } else {
    CopyEach<uint8_t>(block, from, to, num_to, 0, bytes);
    return;
  }
  CopyEach<uint8_t>(block, from, to, num_to, 0, cut.head);
  CopyEach<uint8_t>(block, from, to, num_to, bytes - cut.tail, cut.tail);
}

// The threads of a block that take one row: as many as have kInFlight vectors of 16 bytes each, at
// most a warp. `index` is the group of threads.
CPD_DEVICE Block RowTakers(const Block& block, int64_t row_bytes) {
  int num = 1;
  while (num < 32 && 2 * num <= block.num_threads && 16 * kInFlight * num < row_bytes) num *= 2;
  Block takers = block;
  takers.num_threads = num;
  takers.thread = block.thread % num;
  takers.index = block.thread / num;
  takers.num_blocks = block.num_threads / num;
  return takers;
}

// All threads of a block, which take rows together.
CPD_DEVICE Block AllTakers(Block block) {
  block.index = 0;
  block.num_blocks = 1;
  return block;
}

// Fills `bytes` with one value.
CPD_DEVICE void Fill(const Block& block, char* to, uint8_t value, int64_t bytes) {
  const Cut cut = CutCopy(reinterpret_cast<uint64_t>(to), 0, bytes);
  CPD_NO_UNROLL
  for (int64_t i = block.thread; i < cut.head; i += block.num_threads) to[i] = value;
  const uint32_t word = value * 0x01010101u;
  Vector16* vectors = reinterpret_cast<Vector16*>(to + cut.head);
  CPD_NO_UNROLL
  for (int64_t i = block.thread; i < cut.count; i += block.num_threads) {
    vectors[i] = {{word, word, word, word}};
  }
  char* end = to + bytes - cut.tail;
  CPD_NO_UNROLL
  for (int64_t i = block.thread; i < cut.tail; i += block.num_threads) end[i] = value;
}

}  // namespace cpd::kernels
