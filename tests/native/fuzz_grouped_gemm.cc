// Coverage-guided fuzzing of how the grouped GEMM handler checks a call: any attributes, shapes and
// group sizes are rejected or describe products that stay within the arrays. See fuzz.sh.
#include <vector>

#include "ffi/gemm_call.h"
#include "fuzz_gemm_program.h"

namespace cpd {
namespace {}  // namespace

void Run(Chooser& c) {
  constexpr XLA_FFI_DataType kWide[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                        XLA_FFI_DataType_F64};
  GroupedGemmOptions options{"fuzz", c.Number(1, 2), c.Number(0, 2), c.Flag(), c.Flag(), c.Flag()};
  const int64_t groups = c.Number(0, 4), m = c.Number(0, 9), k = c.Number(0, 9), n = c.Number(0, 9);
  const XLA_FFI_DataType wide = kWide[c.Number(0, 2)];
  const bool is_narrow = options.scaling_mode != 0, contracts = options.contracts_rows;
  const XLA_FFI_DataType lhs = is_narrow ? XLA_FFI_DataType_F8E4M3FN : wide;
  const XLA_FFI_DataType rhs = is_narrow && c.Flag() ? XLA_FFI_DataType_F8E5M2 : lhs;
  const auto dims = [&](std::vector<int64_t> fitting) { return c.Dims(std::move(fitting)); };
  const auto matrices = [&](int64_t rows, int64_t columns) {
    return options.rhs_transposed && !contracts ? dims({groups, columns, rows})
                                                : dims({groups, rows, columns});
  };
  const std::vector<Shape> shapes = {
      {c.Type(lhs), dims({m, k})},
      {c.Type(XLA_FFI_DataType_F32), dims({is_narrow ? groups : 1})},
      {c.Type(rhs), contracts ? dims({m, n}) : matrices(k, n)},
      {c.Type(XLA_FFI_DataType_F32), dims({is_narrow ? groups : 1})},
      {c.Type(wide), options.fuse_bias ? dims({groups, n}) : dims({1})},
      {c.Type(XLA_FFI_DataType_S32), dims({groups})},
      {c.Type(wide), contracts ? matrices(k, n) : dims({m, n})}};
  options.num_threads = c.MostlyOrHostile(options.num_threads);
  options.scaling_mode = c.MostlyOrHostile(options.scaling_mode);
  Arrays arrays;
  std::vector<xla::ffi::AnyBuffer> b;
  for (size_t i = 0; i < shapes.size(); ++i) {
    b.emplace_back(arrays.Make(shapes[i]));
    if (i == 5) arrays.FillWithIntegers(&c);
  }
  GroupedProduct product;
  const GroupedGemmBuffers buffers{b[0], b[1], b[2], b[3], b[4], b[5], b[6]};
  if (IsRefused(DescribeGrouped(options, buffers, &product), "fuzz")) return;
  IsRefused(RunGroupedGemm("fuzz", product, static_cast<int>(options.num_threads)), "fuzz");
}

}  // namespace cpd
