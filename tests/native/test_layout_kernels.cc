// Operands and scales in the order of tensor cores, on threads of the host.
#include <random>

#include "device.h"
#include "gemm/overlap_problem.h"
#include "kernels/product.h"
#include "native_test.h"

namespace cpd::kernels::test_layout_kernels {

std::mt19937 rng(0);

// With gaps at the edges of tiles; 16 bytes at a time where lines and addresses allow it.
void BytesAreTransposed(int64_t num_rows, int64_t num_columns, int64_t offset) {
  std::vector<char> memory(num_rows * num_columns + 32), result(memory.size());
  for (char& byte : memory) byte = static_cast<char>(rng());
  const auto aligned = [&](std::vector<char>& x) {
    return x.data() + (16 - reinterpret_cast<uintptr_t>(x.data()) % 16) % 16 + offset;
  };
  const char* from = aligned(memory);
  char* to = aligned(result);
  const TransposeCall call{from, to, num_rows, num_columns};
  Launch<TransposeScratch>(3, 64,
                           [&](const Block& b, TransposeScratch* s) { Transpose(b, call, s); });
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_columns; ++j) {
      CHECK(to[j * num_rows + i] == from[i * num_columns + j]);
    }
  }
}

void ScalesLieAsOnTheCpu(bool across) {
  constexpr int64_t kLines = 200, kBlocks = 6, kPitchOfLines = 256, kPitchOfBlocks = 8;
  std::vector<char> scales(kPitchOfLines * kPitchOfBlocks);
  for (char& byte : scales) byte = static_cast<char>(rng());
  const int64_t pitch = across ? kPitchOfLines : kPitchOfBlocks;
  std::vector<char> expected(2 * 2 * 512), got(expected.size(), 1);
  SwizzleScales({scales.data(), pitch, across}, kLines, kBlocks, expected.data());
  const SwizzleCall call{scales.data(), got.data(), pitch, across, kLines, kBlocks};
  Launch<int>(3, 64, [&](const Block& b, int*) { Swizzle(b, call); });
  CHECK(got == expected);
}

const Register kTests("test_layout_kernels", [](const Numbers&) {
  for (const bool is_across : {false, true}) ScalesLieAsOnTheCpu(is_across);
  BytesAreTransposed(70, 33, 0);
  BytesAreTransposed(80, 144, 0);
  BytesAreTransposed(80, 144, 1);
  BytesAreTransposed(16, 208, 0);
});

}  // namespace cpd::kernels::test_layout_kernels
