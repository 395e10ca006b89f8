// The order in which tensor cores read block scales.
#pragma once

#include <cstdint>

namespace cpd {

constexpr int64_t kLinesInTile = 128, kScalesInTile = 4;

// Scale of `line` and `block` at data + line * pitch + block, or, if `across`, at
// data + block * pitch + line.
struct BlockScales {
  const char* data;
  int64_t pitch;
  bool across;
};

// Tiles [ceil(num_lines / 128), ceil(num_blocks / 4), 512], filled up with zeros; in a tile, that
// of a line and a block lies at line % 32 * 16 + line / 32 * 4 + block.
void SwizzleScales(const BlockScales& scales, int64_t num_lines, int64_t num_blocks, char* tiles);

}  // namespace cpd
