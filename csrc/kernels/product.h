// The work around a product, as a block runs it: sums of partial products with their epilogue, bias
// gradients, and operands in the order of tensor cores.
#pragma once

#include <cmath>

#include "kernels/block.h"
#include "kernels/call.h"
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

// GELU by tanh, and its derivative; csrc/gemm/epilogue.cc has the vectorized version.
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

template <typename In, typename Out>
CPD_DEVICE void StoreSums(const Block& block, const SumCall& call) {
  const auto* bias = reinterpret_cast<const Out*>(call.bias);
  const auto* gelu_input = reinterpret_cast<const Out*>(call.gelu_input);
  auto* pre_gelu = reinterpret_cast<Out*>(call.pre_gelu);
  auto* to = reinterpret_cast<Out*>(call.to);
  for (int64_t row = block.index; row < call.num_rows; row += block.num_blocks) {
    for (int64_t column = block.thread; column < call.num_columns; column += block.num_threads) {
      const int64_t from = row * call.pitch + column, at = row * call.to_pitch + column;
      float sum = 0;
      for (int s = 0; s < call.num_sources; ++s) {
        const auto part = static_cast<float>(reinterpret_cast<const In*>(call.sources[s])[from]);
        sum = s == 0 ? part : sum + part;  // keeps -0
      }
      if (bias) sum += static_cast<float>(bias[column]);
      if (gelu_input) {
        sum *= GeluDerivative(static_cast<float>(gelu_input[at]));
      } else if (call.gelu) {
        if (pre_gelu) pre_gelu[at] = Round<Out>(sum);
        sum = Gelu(sum);
      }
      to[at] = Round<Out>(sum);
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

constexpr int kLanes = 32, kMaxGroups = 32;

struct ColumnsScratch {
  float sums[kMaxGroups][kLanes];
};

// A block takes 32 columns, whose rows alternate among groups of 32 threads; if columns are
// contiguous, all threads take one column. Sums of groups or threads are added in order.
template <typename In, typename Out>
CPD_DEVICE void SumColumns(const Block& block, const ColumnsCall& call, ColumnsScratch* scratch) {
  const auto* data = reinterpret_cast<const In*>(call.data);
  auto* out = reinterpret_cast<Out*>(call.out);
  const int lane = block.thread % kLanes, group = block.thread / kLanes;
  const int num_groups = block.num_threads / kLanes;
  const bool is_across = call.by_column == 1;  // neighbouring threads read one row
  const int64_t at_once = is_across ? kLanes : 1;
  const int64_t first = is_across ? group : block.thread;
  const int64_t step = is_across ? num_groups : block.num_threads;
  const float scale = call.scale ? *call.scale : 1;
  for (int64_t begin = block.index * at_once; begin < call.num_columns;
       begin += block.num_blocks * at_once) {
    const int64_t column = is_across ? begin + lane : begin;
    float sum = 0;
    if (column < call.num_columns) {
      for (int64_t row = first; row < call.num_rows; row += step) {
        sum += static_cast<float>(data[row * call.by_row + column * call.by_column]);
      }
    }
    scratch->sums[group][lane] = sum;
    block.Sync();
    if (group == 0 && (is_across || lane == 0) && column < call.num_columns) {
      float total = 0;
      for (int g = 0; g < num_groups; ++g) {
        if (is_across) {
          total += scratch->sums[g][lane];
        } else {
          for (int l = 0; l < kLanes; ++l) total += scratch->sums[g][l];
        }
      }
      out[column] = Round<Out>(total * scale);
    }
    block.Sync();
  }
}

// to [num_columns, num_rows] from bytes [num_rows, num_columns].
struct TransposeCall {
  const char* from;
  char* to;
  int64_t num_rows, num_columns;
};

constexpr int kTile = 64, kWide = 16;

struct alignas(16) Wide {
  uint32_t words[kWide / 4];
};

// One word more per line: the lanes of a warp that read a column meet different banks.
struct TransposeScratch {
  alignas(4) char bytes[kTile][kTile + 4];
};

// A block takes tiles of 64 x 64 bytes; a thread reads and writes 16 bytes of a line at once, or
// what is left of them, byte by byte, if lines or addresses are not multiples of 16 bytes.
CPD_DEVICE void Transpose(const Block& block, const TransposeCall& call,
                          TransposeScratch* scratch) {
  constexpr int kChunks = kTile / kWide;  // of a line of a tile
  const int64_t num_rows = call.num_rows, num_columns = call.num_columns;
  const auto addresses =
      reinterpret_cast<uintptr_t>(call.from) | reinterpret_cast<uintptr_t>(call.to);
  const bool is_wide = num_rows % kWide == 0 && num_columns % kWide == 0 && addresses % kWide == 0;
  const int64_t tiles_across = (num_columns + kTile - 1) / kTile;
  const int64_t num_tiles = tiles_across * ((num_rows + kTile - 1) / kTile);
  for (int64_t tile = block.index; tile < num_tiles; tile += block.num_blocks) {
    const int64_t row = tile / tiles_across * kTile, column = tile % tiles_across * kTile;
    for (int i = block.thread; i < kTile * kChunks; i += block.num_threads) {
      const int line = i / kChunks, at = i % kChunks * kWide;
      if (row + line >= num_rows || column + at >= num_columns) continue;
      const char* from = call.from + (row + line) * num_columns + column + at;
      char* kept = scratch->bytes[line] + at;
      if (is_wide) {
        const Wide value = *reinterpret_cast<const Wide*>(from);
        CPD_UNROLL
        for (int w = 0; w < kWide / 4; ++w) reinterpret_cast<uint32_t*>(kept)[w] = value.words[w];
      } else {
        for (int b = 0; b < kWide && column + at + b < num_columns; ++b) kept[b] = from[b];
      }
    }
    block.Sync();
    for (int i = block.thread; i < kTile * kChunks; i += block.num_threads) {
      const int line = i / kChunks, at = i % kChunks * kWide;
      if (column + line >= num_columns || row + at >= num_rows) continue;
      char* to = call.to + (column + line) * num_rows + row + at;
      if (is_wide) {
        Wide value{};
        CPD_UNROLL
        for (int b = 0; b < kWide; ++b) {
          const auto byte = static_cast<uint8_t>(scratch->bytes[at + b][line]);
          value.words[b / 4] |= static_cast<uint32_t>(byte) << (b % 4 * 8);
        }
        *reinterpret_cast<Wide*>(to) = value;
      } else {
        for (int b = 0; b < kWide && row + at + b < num_rows; ++b) {
          to[b] = scratch->bytes[at + b][line];
        }
      }
    }
    block.Sync();
  }
}

// Block scales in the order of tensor cores; see gemm/swizzle.h.
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
