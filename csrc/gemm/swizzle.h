// The order in which tensor cores read block scales.
#pragma once

#include <cstdint>

namespace cpd {

constexpr int64_t kLinesInTile = 128, kScalesInTile = 4;

// The scale of `line` and `block` is at data + line * pitch + block or, if `across`, at data +
// block * pitch + line.
struct BlockScales {
  const char* data;
  int64_t pitch;
  bool across;
};

// Tiles [ceil(num_lines / 128), ceil(num_blocks / 4), 512], padded with zeros. In a tile, the scale
// of a line and a block is at line % 32 * 16 + line / 32 * 4 + block.
void SwizzleScales(const BlockScales& scales, int64_t num_lines, int64_t num_blocks, char* tiles);

}  // namespace cpd
