// The order in which tensor cores read block scales.
#include "gemm/swizzle.h"

namespace cpd {

void SwizzleScales(const BlockScales& scales, int64_t num_lines, int64_t num_blocks, char* tiles) {
  for (int64_t first_line = 0; first_line < num_lines; first_line += kLinesInTile) {
    for (int64_t first_block = 0; first_block < num_blocks; first_block += kScalesInTile) {
      for (int64_t i = 0; i < kLinesInTile; ++i) {
        for (int64_t j = 0; j < kScalesInTile; ++j) {
          const int64_t line = first_line + i, block = first_block + j;
          const bool is_there = line < num_lines && block < num_blocks;
          const int64_t at =
              scales.across ? block * scales.pitch + line : line * scales.pitch + block;
          tiles[i % 32 * 16 + i / 32 * 4 + j] = is_there ? scales.data[at] : 0;
        }
      }
      tiles += kLinesInTile * kScalesInTile;
    }
  }
}

}  // namespace cpd
