// The work around a product, as a block runs it: sums of partial products with their epilogue, bias
// gradients, and operands in the order of tensor cores.
#pragma once

#include <cmath>

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "numerics/element.h"

namespace cpd::kernels {

// to [num_rows, num_columns] = the sum of the sources in order, in float32, then bias, GELU or its
// derivative, rounded once. GELU's arrays have the layout and type of `to`.
struct SumCall {
  const char* sources[kMaxRanks];
  int num_sources;
  DataType type;
  int64_t pitch;  // elements
  int64_t num_rows, num_columns;
  const char* bias;  // [num_columns], or nullptr
  bool gelu;
  char* pre_gelu;          // or nullptr
  const char* gelu_input;  // or nullptr
  char* to;
  DataType to_type;
  int64_t to_pitch;
};

// GELU by tanh, and its derivative; csrc/gemm/gemm.cc has the vectorized version.
CPD_DEVICE float Gelu(float x) {
  const float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1 + tanhf(u));
}

CPD_DEVICE float GeluDerivative(float x) {
  const float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  const float slope = 0.79788456080286536f * (1 + 3 * 0.044715f * x * x);
  const float tanh = tanhf(u);
  const float bend = tanh * tanh < 1 ? (1 - tanh * tanh) * slope : 0;  // not 0 times infinity
  return 0.5f * (1 + tanh) + 0.5f * x * bend;
}

// N elements from element `at` on.
template <typename T, int N>
CPD_DEVICE const Elements<T, N>& ElementsAt(const char* data, int64_t at) {
  return *reinterpret_cast<const Elements<T, N>*>(reinterpret_cast<const T*>(data) + at);
}
template <typename T, int N>
CPD_DEVICE Elements<T, N>& ElementsAt(char* data, int64_t at) {
  return *reinterpret_cast<Elements<T, N>*>(reinterpret_cast<T*>(data) + at);
}

CPD_DEVICE uint64_t AddressOf(const char* data) { return reinterpret_cast<uint64_t>(data); }

// Elements of which a thread takes 16 bytes of the narrower type, if everything is aligned.
template <typename In, typename Out>
constexpr int kElementsAtOnce = 16 / (sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));

// N neighbouring elements of the result.
template <typename In, typename Out, int N>
CPD_DEVICE void StoreSum(const SumCall& call, int64_t row, int64_t column) {
  const int64_t from = row * call.pitch + column, at = row * call.to_pitch + column;
  float sums[N] = {};
  CPD_NO_UNROLL
  for (int s = 0; s < call.num_sources; ++s) {
    const Elements<In, N> part = ElementsAt<In, N>(call.sources[s], from);
    CPD_UNROLL
    for (int n = 0; n < N; ++n) {
      const auto value = static_cast<float>(part.items[n]);
      sums[n] = s == 0 ? value : sums[n] + value;  // keeps -0
    }
  }
  Elements<Out, N> bias{}, input{}, pre{}, out{};
  if (call.bias) bias = ElementsAt<Out, N>(call.bias, column);
  if (call.gelu_input) input = ElementsAt<Out, N>(call.gelu_input, at);
  CPD_UNROLL
  for (int n = 0; n < N; ++n) {
    float sum = sums[n];
    if (call.bias) sum += static_cast<float>(bias.items[n]);
    if (call.gelu_input) {
      sum *= GeluDerivative(static_cast<float>(input.items[n]));
    } else if (call.gelu) {
      pre.items[n] = Round<Out>(sum);
      sum = Gelu(sum);
    }
    out.items[n] = Round<Out>(sum);
  }
  if (call.gelu && call.pre_gelu && !call.gelu_input) ElementsAt<Out, N>(call.pre_gelu, at) = pre;
  ElementsAt<Out, N>(call.to, at) = out;
}

template <typename In, typename Out>
CPD_DEVICE void StoreSums(const Block& block, const SumCall& call) {
  constexpr int kAtOnce = kElementsAtOnce<In, Out>;
  uint64_t addresses = AddressOf(call.to) | AddressOf(call.bias) | AddressOf(call.gelu_input) |
                       AddressOf(call.pre_gelu);
  for (int s = 0; s < call.num_sources; ++s) addresses |= AddressOf(call.sources[s]);
  const bool is_aligned =
      addresses % 16 == 0 && call.pitch % kAtOnce == 0 && call.to_pitch % kAtOnce == 0;
  const int64_t num_wide = is_aligned ? call.num_columns / kAtOnce : 0;
  for (int64_t row = block.index; row < call.num_rows; row += block.num_blocks) {
    for (int64_t i = block.thread; i < num_wide; i += block.num_threads) {
      StoreSum<In, Out, kAtOnce>(call, row, i * kAtOnce);
    }
    for (int64_t column = num_wide * kAtOnce + block.thread; column < call.num_columns;
         column += block.num_threads) {
      StoreSum<In, Out, 1>(call, row, column);
    }
  }
}

// out[column] = the sum of a matrix's rows, times a scale. Element [row, column] is at row * by_row
// + column * by_column; one of the two is 1.
struct ColumnsCall {
  const char* data;
  DataType type;
  const float* scale;  // or nullptr
  int64_t by_row, by_column;
  int64_t num_rows, num_columns;
  char* out;
  DataType out_type;
};

// Columns that a block takes at a time, if a row's elements are neighbours, and groups of threads
// that take rows in turn.
constexpr int kColumns = 32, kMaxGroups = 128;

struct ColumnsScratch {
  float sums[kMaxGroups][kColumns];
};

// A block takes 32 columns: each thread N neighbouring ones, each group of threads a row.
template <typename In, typename Out, int N>
CPD_DEVICE void SumAcrossRows(const Block& block, const ColumnsCall& call,
                              ColumnsScratch* scratch) {
  constexpr int kLanes = kColumns / N;
  const int lane = block.thread % kLanes, group = block.thread / kLanes;
  const int all = block.num_threads / kLanes, num_groups = all < kMaxGroups ? all : kMaxGroups;
  for (int64_t begin = int64_t{block.index} * kColumns; begin < call.num_columns;
       begin += int64_t{block.num_blocks} * kColumns) {
    const int64_t column = begin + lane * N;
    float sums[N] = {};
    if (group < num_groups && column < call.num_columns) {
      for (int64_t row = group; row < call.num_rows; row += num_groups) {
        const Elements<In, N> read = ElementsAt<In, N>(call.data, row * call.by_row + column);
        CPD_UNROLL
        for (int n = 0; n < N; ++n) sums[n] += static_cast<float>(read.items[n]);
      }
    }
    if (group < num_groups) {
      CPD_UNROLL
      for (int n = 0; n < N; ++n) scratch->sums[group][lane * N + n] = sums[n];
    }
    block.Sync();
    if (block.thread < kColumns && begin + block.thread < call.num_columns) {
      float total = 0;
      CPD_NO_UNROLL
      for (int g = 0; g < num_groups; ++g) total += scratch->sums[g][block.thread];
      const float scale = call.scale ? *call.scale : 1;
      ElementsAt<Out, 1>(call.out, begin + block.thread) = {Round<Out>(total * scale)};
    }
    block.Sync();
  }
}

// All threads of a block take one column, N of its rows at a time.
template <typename In, typename Out, int N>
CPD_DEVICE void SumAlongColumns(const Block& block, const ColumnsCall& call,
                                ColumnsScratch* scratch) {
  for (int64_t column = block.index; column < call.num_columns; column += block.num_blocks) {
    float sum = 0;
    for (int64_t row = int64_t{block.thread} * N; row < call.num_rows;
         row += int64_t{block.num_threads} * N) {
      const Elements<In, N> read = ElementsAt<In, N>(call.data, row + column * call.by_column);
      CPD_UNROLL
      for (int n = 0; n < N; ++n) sum += static_cast<float>(read.items[n]);
    }
    scratch->sums[block.thread / kColumns][block.thread % kColumns] = sum;
    block.Sync();
    if (block.thread == 0) {
      float total = 0;
      CPD_NO_UNROLL
      for (int t = 0; t < block.num_threads; ++t) {
        total += scratch->sums[t / kColumns][t % kColumns];
      }
      const float scale = call.scale ? *call.scale : 1;
      ElementsAt<Out, 1>(call.out, column) = {Round<Out>(total * scale)};
    }
    block.Sync();
  }
}

// Sums of threads are added in order. A thread reads 16 bytes at a time if everything is aligned.
template <typename In, typename Out>
CPD_DEVICE void SumColumns(const Block& block, const ColumnsCall& call, ColumnsScratch* scratch) {
  constexpr int kAtOnce = 16 / sizeof(In);
  const bool is_across = call.by_column == 1;  // a row's elements are neighbours
  const int64_t neighbours = is_across ? call.num_columns : call.num_rows;
  const int64_t pitch = is_across ? call.by_row : call.by_column;
  const bool is_wide =
      AddressOf(call.data) % 16 == 0 && neighbours % kAtOnce == 0 && pitch % kAtOnce == 0;
  if (is_across) {
    is_wide ? SumAcrossRows<In, Out, kAtOnce>(block, call, scratch)
            : SumAcrossRows<In, Out, 1>(block, call, scratch);
  } else {
    is_wide ? SumAlongColumns<In, Out, kAtOnce>(block, call, scratch)
            : SumAlongColumns<In, Out, 1>(block, call, scratch);
  }
}

// to [num_columns, num_rows] from bytes [num_rows, num_columns].
struct TransposeCall {
  const char* from;
  char* to;
  int64_t num_rows, num_columns;
};

constexpr int kTransposeTile = 64, kWide = 16;

// One word more per line: the lanes of a warp that read a column meet different banks.
struct TransposeScratch {
  alignas(4) char bytes[kTransposeTile][kTransposeTile + 4];
};

// A block takes tiles of 64 x 64 bytes; a thread reads and writes 16 bytes of a line at once, or
// what is left of them, byte by byte, if lines or addresses are not multiples of 16 bytes.
CPD_DEVICE void Transpose(const Block& block, const TransposeCall& call,
                          TransposeScratch* scratch) {
  constexpr int kChunks = kTransposeTile / kWide;  // of a line of a tile
  const int64_t num_rows = call.num_rows, num_columns = call.num_columns;
  const auto addresses =
      reinterpret_cast<uintptr_t>(call.from) | reinterpret_cast<uintptr_t>(call.to);
  const bool is_wide = num_rows % kWide == 0 && num_columns % kWide == 0 && addresses % kWide == 0;
  const int64_t tiles_across = (num_columns + kTransposeTile - 1) / kTransposeTile;
  const int64_t num_tiles = tiles_across * ((num_rows + kTransposeTile - 1) / kTransposeTile);
  for (int64_t tile = block.index; tile < num_tiles; tile += block.num_blocks) {
    const int64_t row = tile / tiles_across * kTransposeTile,
                  column = tile % tiles_across * kTransposeTile;
    for (int i = block.thread; i < kTransposeTile * kChunks; i += block.num_threads) {
      const int line = i / kChunks, at = i % kChunks * kWide;
      if (row + line >= num_rows || column + at >= num_columns) continue;
      const char* from = call.from + (row + line) * num_columns + column + at;
      char* kept = scratch->bytes[line] + at;
      if (is_wide) {
        const Vector16 value = *reinterpret_cast<const Vector16*>(from);
        CPD_UNROLL
        for (int w = 0; w < kWide / 4; ++w) reinterpret_cast<uint32_t*>(kept)[w] = value.words[w];
      } else {
        for (int b = 0; b < kWide && column + at + b < num_columns; ++b) kept[b] = from[b];
      }
    }
    block.Sync();
    for (int i = block.thread; i < kTransposeTile * kChunks; i += block.num_threads) {
      const int line = i / kChunks, at = i % kChunks * kWide;
      if (column + line >= num_columns || row + at >= num_rows) continue;
      char* to = call.to + (column + line) * num_rows + row + at;
      if (is_wide) {
        Vector16 value{};
        CPD_UNROLL
        for (int b = 0; b < kWide; ++b) {
          const auto byte = static_cast<uint8_t>(scratch->bytes[at + b][line]);
          value.words[b / 4] |= static_cast<uint32_t>(byte) << (b % 4 * 8);
        }
        *reinterpret_cast<Vector16*>(to) = value;
      } else {
        for (int b = 0; b < kWide && row + at + b < num_rows; ++b) {
          to[b] = scratch->bytes[at + b][line];
        }
      }
    }
    block.Sync();
  }
}

// Block scales in the order of tensor cores; see gemm/overlap_problem.h.
struct SwizzleCall {
  const char* scales;
  char* tiles;
  int64_t pitch;
  bool across;
  int64_t num_lines, num_blocks;
};

CPD_DEVICE void Swizzle(const Block& block, const SwizzleCall& call) {
  constexpr int64_t kLines = 128, kScales = 4;
  const int64_t tiles_across = (call.num_blocks + kScales - 1) / kScales;
  const int64_t num_tiles = tiles_across * ((call.num_lines + kLines - 1) / kLines);
  for (int64_t tile = block.index; tile < num_tiles; tile += block.num_blocks) {
    for (int i = block.thread; i < kLines * kScales; i += block.num_threads) {
      // Byte i of a tile belongs to line i % 16 / 4 * 32 + i / 16 and block i % 4.
      const int64_t line = tile / tiles_across * kLines + i % 16 / 4 * 32 + i / 16;
      const int64_t index = tile % tiles_across * kScales + i % 4;
      const int64_t at = call.across ? index * call.pitch + line : line * call.pitch + index;
      const bool is_there = line < call.num_lines && index < call.num_blocks;
      call.tiles[tile * kLines * kScales + i] = is_there ? call.scales[at] : 0;
    }
  }
}

}  // namespace cpd::kernels
