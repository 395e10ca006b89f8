// Coverage-guided fuzzing of what the GEMM handler checks of a call: any attributes and shapes are
// refused, or describe products of all ranks that end and stay within the arrays. See fuzz.sh.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/gemm_call.h"
#include "gemm/blas.h"
#include "gemm/overlap_contribution.h"
#include "gemm/plan_overlap.h"

namespace cpd {
namespace {

// As Fortran has it: column-major, everything by address.
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

constexpr XLA_FFI_DataType kTypes[] = {
    XLA_FFI_DataType_F32,    XLA_FFI_DataType_BF16, XLA_FFI_DataType_F16, XLA_FFI_DataType_F8E4M3FN,
    XLA_FFI_DataType_F8E5M2, XLA_FFI_DataType_U8,   XLA_FFI_DataType_F64, XLA_FFI_DataType_S32};

// Arrays of one rank, in memory of exactly their size, so that the sanitizer sees every access
// beside it.
class Arrays {
 public:
  xla::ffi::AnyBuffer Make(XLA_FFI_DataType type, std::vector<int64_t> dims) {
    Array& array = arrays_.emplace_back();
    array.dims = std::move(dims);
    array.buffer = {
        XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, nullptr, static_cast<int64_t>(array.dims.size()),
        array.dims.data()};
    xla::ffi::AnyBuffer buffer(&array.buffer);
    array.bytes = std::make_unique<char[]>(buffer.size_bytes());
    array.buffer.data = array.bytes.get();
    return buffer;
  }

 private:
  struct Array {
    XLA_FFI_Buffer buffer;
    std::vector<int64_t> dims;
    std::unique_ptr<char[]> bytes;
  };
  std::deque<Array> arrays_;
};

// What the program says, which is the same on all ranks.
struct Shape {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
};

class Fuzzer {
 public:
  explicit Fuzzer(const uint8_t* bytes, size_t num_bytes) : data_(bytes, num_bytes) {}

  void Run() {
    const GemmOptions options = Options();
    std::vector<Shape> shapes = Shapes(options);
    std::vector<Arrays> arrays(std::max<int64_t>(1, options.num_ranks));
    const std::string op(options.op);
    OverlapProblem problem;
    std::vector<RankMemory> memory;
    std::vector<std::unique_ptr<Contribution>> ranks;
    for (Arrays& rank : arrays) {
      const GemmBuffers buffers = Make(shapes, &rank);
      OverlapProblem mine;
      const Status status = Describe(op, options, buffers, &mine);
      if (!status.ok()) {
        if (status.message.rfind(op, 0) != 0) __builtin_trap();
        return;
      }
      memory.push_back(MemoryOf(options, mine, buffers));
      ranks.push_back(std::make_unique<OverlapContribution>(mine, memory.back()));
      problem = mine;
    }
    if (problem.config.type == CommType::kNone) {
      RunGemm(WholeProduct(problem, memory[0]), /*num_threads=*/1);
      FinishProduct(problem, memory[0], memory[0].lhs_scales);
      return;
    }
    RunSchedule(op, options, problem, ranks);
  }

 private:
  int64_t Number(int64_t least, int64_t most) {
    return data_.ConsumeIntegralInRange<int64_t>(least, most);
  }
  // Mostly what fits: others are refused at the first look.
  int64_t Mostly(int64_t fitting, int64_t least, int64_t most) {
    return Number(0, 31) ? fitting : Number(least, most);
  }

  GemmOptions Options() {
    GemmOptions o{};
    o.op = "fuzz";
    o.axis = "cp";
    o.deadline_ms = 5000;
    o.num_threads = 1;
    o.scaling_mode = Mostly(Number(0, 3), -1, 5);
    o.comm_overlap_method = Mostly(Number(0, 3), -1, 5);
    o.comm_type = Mostly(Number(0, 2), -1, 5);
    o.num_ranks = o.comm_type == 0 ? 0 : Mostly(Number(1, 4), -1, 4);
    o.num_splits = Mostly(Number(1, 4), -1, 9);
    for (bool* flag : {&o.atomic, &o.overlap_first_gemm, &o.aggregate, &o.copies, &o.lhs_transposed,
                       &o.rhs_transposed, &o.fuse_bias, &o.fuse_gelu, &o.grad, &o.in_ring_order,
                       &o.gathers_to_aux}) {
      *flag = data_.ConsumeBool();
    }
    o.num_batches = Mostly(Number(1, 2), -1, 4);
    for (int64_t i = Mostly(o.num_ranks, 0, 5); i > 0; --i) {
      row_counts_.push_back(Mostly(Number(0, 3), -1, 9));
    }
    o.row_counts = {row_counts_.data(), row_counts_.size()};
    o.lhs_axis_boundary = Mostly(1, -1, 3);
    o.rhs_axis_boundary = Mostly(1, -1, 3);
    o.aux_axis_boundary = Mostly(1, -1, 3);
    return o;
  }

  // Two dimensions that fit, or any.
  std::vector<int64_t> Dims(int64_t rows, int64_t columns, bool transposed = false) {
    if (transposed) std::swap(rows, columns);
    if (Number(0, 31) == 0) return {Mostly(rows, 0, 9), Mostly(columns, 0, 9), Number(0, 3)};
    return {Mostly(rows, 0, 9), Mostly(columns, 0, 9)};
  }

  XLA_FFI_DataType Type(XLA_FFI_DataType fitting) {
    return Number(0, 31) ? fitting : kTypes[Number(0, std::size(kTypes) - 1)];
  }

  std::vector<Shape> Shapes(const GemmOptions& o) {
    int64_t total = 0, most = 0;
    for (const int64_t count : row_counts_) {
      total += std::max<int64_t>(count, 0);
      most = std::max(most, count);
    }
    const int64_t batches = std::max<int64_t>(o.num_batches, 0);
    const int64_t alone = batches * (most + Mostly(0, 0, 2)), together = batches * total;
    const bool is_bulk = o.comm_overlap_method == 1, gathers = o.comm_type == 2;
    const bool is_plain = o.comm_type == 0 || is_bulk;
    const int64_t m = Number(0, 9), n = Number(0, 9);
    const int64_t k = o.scaling_mode == 3 ? 32 * Number(0, 2) : Number(0, 9), width = Number(0, 5);
    const int64_t in = is_plain ? m : gathers ? alone : together;
    const int64_t out = is_plain ? m : gathers ? together : alone;
    const int64_t aux_in = gathers ? alone : together, aux_out = gathers ? together : alone;
    const int64_t multiplied = is_plain || !gathers ? in : together;
    const auto up = [](int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; };
    const int64_t blocks = up(k / 32, 4);
    const bool is_narrow = o.scaling_mode != 0, is_blocks = o.scaling_mode == 3;
    const XLA_FFI_DataType wide = kTypes[Number(0, 2)];
    const XLA_FFI_DataType lhs = is_narrow ? XLA_FFI_DataType_F8E4M3FN : wide;
    const XLA_FFI_DataType rhs = is_narrow && Number(0, 1) ? XLA_FFI_DataType_F8E5M2 : lhs;
    const XLA_FFI_DataType aux = kTypes[Number(0, 2)];
    const XLA_FFI_DataType scale = is_blocks ? XLA_FFI_DataType_U8 : XLA_FFI_DataType_F32;
    const bool gives_tiles = is_blocks && data_.ConsumeBool();
    const auto tiles = [&](int64_t lines, bool is_there) -> Shape {
      return is_there ? Shape{Type(XLA_FFI_DataType_U8), Dims(up(lines, 128), blocks)}
                      : Shape{Type(XLA_FFI_DataType_F32), {1}};
    };
    const auto scales = [&](int64_t lines) -> Shape {
      return {Type(scale), is_blocks ? Dims(up(lines, 128), blocks) : Dims(1, 1)};
    };
    const auto row = [&](bool is_there) { return Dims(1, is_there ? n : 1); };
    const auto result = [&](bool is_there) { return is_there ? Dims(multiplied, n) : Dims(1, 1); };
    Shape gathered{Type(aux), Dims(aux_out, width)};
    if (!is_bulk) gathered = {Type(lhs), o.gathers_to_aux ? Dims(together, k) : Dims(alone, k)};
    // The workspace has what is needed, and sometimes less.
    const int64_t rows = 2 * std::max<int64_t>(o.num_ranks, 1) * (alone + together);
    const int64_t columns = 4 * (std::max(n, k) + width) + 8 * blocks + 64;
    return {
        {Type(lhs), Dims(in, k, o.lhs_transposed)},
        scales(in),
        {Type(rhs), Dims(k, n, o.rhs_transposed)},
        scales(n),
        {Type(wide), row(o.fuse_bias && !o.grad)},
        {Type(wide), result(o.fuse_gelu && o.grad)},
        {Type(aux), Dims(aux_in, width)},
        {Type(wide), Dims(out, n)},
        {Type(wide), row(o.fuse_bias && o.grad)},
        {Type(wide), result(o.fuse_gelu && !o.grad)},
        std::move(gathered),
        tiles(multiplied, gives_tiles && Mostly(is_plain || !gathers || o.gathers_to_aux, 0, 1)),
        tiles(n, gives_tiles),
        {Type(XLA_FFI_DataType_F32), Dims(rows + 256, columns)}};
  }

  GemmBuffers Make(const std::vector<Shape>& shapes, Arrays* rank) {
    std::vector<xla::ffi::AnyBuffer> b;
    for (const Shape& shape : shapes) b.push_back(rank->Make(shape.type, shape.dims));
    return {b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13]};
  }

  static void RunSchedule(const std::string& op, const GemmOptions& options,
                          const OverlapProblem& problem,
                          const std::vector<std::unique_ptr<Contribution>>& ranks) {
    Exchange exchange;
    exchange.op = op;
    exchange.num_ranks = static_cast<int>(options.num_ranks);
    exchange.deadline = std::chrono::milliseconds(options.deadline_ms);
    WorkList work;
    const auto gemm = [](const GemmTask& task) { RunGemm(task, /*num_threads=*/1); };
    if (!PlanOverlap(exchange, problem, /*buffer_id=*/0, gemm, ranks, &work).ok()) {
      __builtin_trap();  // what has been described can be done
    }
    std::vector<std::thread> threads;
    for (int64_t task = 0; task < work.num_tasks; ++task) {
      threads.emplace_back([&work, task] { work.run(task); });
    }
    for (std::thread& thread : threads) thread.join();
    if (const Status status = work.outcome(); !status.ok()) {  // a deadlock
      std::fprintf(stderr, "%s\n", status.message.c_str());
      __builtin_trap();
    }
  }

  FuzzedDataProvider data_;
  std::vector<int64_t> row_counts_;
};

}  // namespace
}  // namespace cpd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes) {
  static const bool is_loaded = [] {
    cpd::LoadBlas(reinterpret_cast<void*>(cpd::PlainBlas<float>),
                  reinterpret_cast<void*>(cpd::PlainBlas<double>));
    return cpd::BlasIsLoaded();
  }();
  if (!is_loaded) __builtin_trap();
  cpd::Fuzzer(bytes, num_bytes).Run();
  return 0;
}
