// Calls of the GEMM handlers for the fuzzers: consistent attributes and shapes, then a few invalid
// ones. Also a BLAS that the sanitizers can check.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "ffi/gemm_call.h"
#include "fuzz_ffi.h"
#include "gemm/blas.h"

namespace cpd {

// In Fortran's convention: column-major, all arguments by address.
template <typename T>
void PlainBlas(const char* transa, const char* transb, const int* m, const int* n, const int* k,
               const T* alpha, const T* a, const int* lda, const T* b, const int* ldb,
               const T* beta, T* c, const int* ldc) {
  const auto at = [](const T* x, const int* pitch, bool transposed, int row, int column) {
    return transposed ? x[int64_t{row} * *pitch + column] : x[int64_t{column} * *pitch + row];
  };
  for (int j = 0; j < *n; ++j) {
    for (int i = 0; i < *m; ++i) {
      T sum = 0;
      for (int l = 0; l < *k; ++l) {
        sum += at(a, lda, *transa == 'T', i, l) * at(b, ldb, *transb == 'T', l, j);
      }
      T& out = c[int64_t{j} * *ldc + i];
      out = *alpha * sum + (*beta == 0 ? 0 : *beta * out);
    }
  }
}

inline bool LoadPlainBlas() {
  LoadBlas(reinterpret_cast<void*>(PlainBlas<float>), reinterpret_cast<void*>(PlainBlas<double>));
  return BlasIsLoaded();
}

// A program's call. Operands and results are in the order of GemmBuffers.
class GemmProgram {
 public:
  static constexpr size_t kNumArgs = 7;

  GemmProgram(Chooser* chooser, int64_t most_ranks) : c_(*chooser) {
    MakeOptions(most_ranks);
    MakeShapes();
    Spoil();
  }

  GemmOptions options;
  std::vector<Shape> shapes;
  int64_t num_ranks;  // that the shapes are for

 private:
  void MakeOptions(int64_t most_ranks) {
    GemmOptions& o = options;
    o = {};
    o.op = "fuzz";
    o.axis = "cp";
    o.deadline_ms = 5000;
    o.num_threads = c_.Number(1, 2);
    o.scaling_mode = c_.Number(0, 3);
    o.comm_overlap_method = c_.Number(0, 3);
    o.comm_type = c_.Number(0, 2);
    o.num_ranks = o.comm_type == 0 ? 0 : c_.Number(1, most_ranks);
    o.problem.config.num_splits = c_.Number(1, 4);
    OverlapProblem& p = o.problem;
    for (bool* flag : {&p.config.atomic, &p.config.overlap_first_gemm, &p.config.aggregate,
                       &p.config.copies, &p.lhs_transposed, &p.rhs_transposed, &o.fuse_bias,
                       &p.fuse_gelu, &o.grad, &p.in_ring_order, &p.gathers_to_aux}) {
      *flag = c_.Flag();
    }
    o.problem.rows.num_batches = c_.Number(1, 2);
    for (int64_t i = o.num_ranks; i > 0; --i) row_counts_.push_back(c_.Number(0, 3));
    o.lhs_axis_boundary = o.rhs_axis_boundary = o.aux_axis_boundary = 1;
    num_ranks = std::max<int64_t>(o.num_ranks, 1);
  }

  // Changes attributes that were consistent with the shapes.
  void Spoil() {
    GemmOptions& o = options;
    for (int64_t* number :
         {&o.deadline_ms, &o.num_threads, &o.scaling_mode, &o.comm_overlap_method, &o.comm_type,
          &o.num_ranks, &o.problem.config.num_splits, &o.problem.rows.num_batches,
          &o.lhs_axis_boundary, &o.rhs_axis_boundary, &o.aux_axis_boundary}) {
      *number = c_.MostlyOrHostile(*number);
    }
    for (int64_t& count : row_counts_) count = c_.MostlyOrHostile(count);
    if (c_.Seldom()) row_counts_.resize(c_.Number(0, 5));
    o.problem.rows.counts = row_counts_;
  }

  std::vector<int64_t> Dims(int64_t rows, int64_t columns, bool transposed = false) {
    return c_.Dims(transposed ? std::vector<int64_t>{columns, rows}
                              : std::vector<int64_t>{rows, columns});
  }

  void MakeShapes() {
    const GemmOptions& o = options;
    constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                           XLA_FFI_DataType_F64};
    int64_t total = 0, most = 0;
    for (const int64_t count : row_counts_) {
      total += count;
      most = std::max(most, count);
    }
    const int64_t batches = o.problem.rows.num_batches;
    const int64_t alone = batches * (most + c_.Mostly(0, 0, 2)), together = batches * total;
    const bool is_bulk = o.comm_overlap_method == 1, gathers = o.comm_type == 2;
    const bool is_plain = o.comm_type == 0 || is_bulk;
    const int64_t m = c_.Number(0, 9), n = c_.Number(0, 9);
    const int64_t k = o.scaling_mode == 3 ? 32 * c_.Number(0, 2) : c_.Number(0, 9),
                  width = c_.Number(0, 5);
    const int64_t in = is_plain ? m : gathers ? alone : together;
    const int64_t out = is_plain ? m : gathers ? together : alone;
    const int64_t aux_in = gathers ? alone : together, aux_out = gathers ? together : alone;
    const int64_t multiplied = is_plain || !gathers ? in : together;
    const auto up = [](int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; };
    const int64_t blocks = up(k / 32, 4);
    const bool is_narrow = o.scaling_mode != 0, is_blocks = o.scaling_mode == 3;
    const XLA_FFI_DataType wide = kTypes[c_.Number(0, 2)];
    const XLA_FFI_DataType lhs = is_narrow ? XLA_FFI_DataType_F8E4M3FN : wide;
    const XLA_FFI_DataType rhs = is_narrow && c_.Number(0, 1) ? XLA_FFI_DataType_F8E5M2 : lhs;
    const XLA_FFI_DataType aux = kTypes[c_.Number(0, 2)];
    const XLA_FFI_DataType scale = is_blocks ? XLA_FFI_DataType_U8 : XLA_FFI_DataType_F32;
    const bool gives_tiles = is_blocks && c_.Flag();
    const auto tiles = [&](int64_t lines, bool is_there) -> Shape {
      return is_there ? Shape{c_.Type(XLA_FFI_DataType_U8), Dims(up(lines, 128), blocks)}
                      : Shape{c_.Type(XLA_FFI_DataType_F32), {1}};
    };
    const auto scales = [&](int64_t lines) -> Shape {
      return {c_.Type(scale), is_blocks ? Dims(up(lines, 128), blocks) : Dims(1, 1)};
    };
    const auto row = [&](bool is_there) { return Dims(1, is_there ? n : 1); };
    const auto result = [&](bool is_there) { return is_there ? Dims(multiplied, n) : Dims(1, 1); };
    Shape gathered{c_.Type(aux), Dims(aux_out, width)};
    if (!is_bulk)
      gathered = {c_.Type(lhs), o.problem.gathers_to_aux ? Dims(together, k) : Dims(alone, k)};
    // A workspace that is large enough.
    const int64_t rows = 2 * std::max<int64_t>(o.num_ranks, 1) * (alone + together);
    const int64_t columns = 4 * (std::max(n, k) + width) + 8 * blocks + 64;
    shapes = {
        {c_.Type(lhs), Dims(in, k, o.problem.lhs_transposed)},
        scales(in),
        {c_.Type(rhs), Dims(k, n, o.problem.rhs_transposed)},
        scales(n),
        {c_.Type(wide), row(o.fuse_bias && !o.grad)},
        {c_.Type(wide), result(o.problem.fuse_gelu && o.grad)},
        {c_.Type(aux), Dims(aux_in, width)},
        {c_.Type(wide), Dims(out, n)},
        {c_.Type(wide), row(o.fuse_bias && o.grad)},
        {c_.Type(wide), result(o.problem.fuse_gelu && !o.grad)},
        std::move(gathered),
        tiles(multiplied,
              gives_tiles && c_.Mostly(is_plain || !gathers || o.problem.gathers_to_aux, 0, 1)),
        tiles(n, gives_tiles),
        {c_.Type(XLA_FFI_DataType_F32), Dims(rows + 256, columns)}};
  }

  Chooser& c_;
  std::vector<int64_t> row_counts_;
};

// What a target does with one input; each target defines it.
void Run(Chooser& chooser);

}  // namespace cpd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes) {
  static const bool is_loaded = cpd::LoadPlainBlas();
  if (!is_loaded) __builtin_trap();
  cpd::Chooser chooser(bytes, num_bytes);
  cpd::Run(chooser);
  return 0;
}
