// The descriptions of products for cuBLASLt, against plain sums in float64: each type, layout,
// epilogue and scaling mode, with a library of plain loops that is opened and called like the real
// one. Prints what failed and exits with 1.
#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gemm/overlap_problem.h"
#include "gemm/swizzle.h"
#include "gpu_schedule/lt_gemm.h"
#include "ranks.h"

namespace cpd {
namespace {

constexpr int64_t kWorkspace = 1024;  // also for sums: of 5 x 44, a few rows at a time
alignas(256) char workspace[kWorkspace];

std::mt19937 rng(0);

float ValueOf(DataType type, const char* data, int64_t i) {
  switch (type) {
    case DataType::kBF16:
      return reinterpret_cast<const BF16*>(data)[i];
    case DataType::kF16:
      return reinterpret_cast<const F16*>(data)[i];
    case DataType::kE4M3:
      return reinterpret_cast<const E4M3*>(data)[i];
    case DataType::kE5M2:
      return reinterpret_cast<const E5M2*>(data)[i];
    default:
      return reinterpret_cast<const float*>(data)[i];
  }
}

// Small numbers of any type; for 8-bit types, any byte that is a number of moderate size.
void Fill(DataType type, std::vector<char>* data) {
  const int64_t count = static_cast<int64_t>(data->size()) / ElementBytes(type);
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(static_cast<int>(rng() % 33) - 16) / 8;
    char* to = data->data() + i * ElementBytes(type);
    if (type == DataType::kF32) std::memcpy(to, &value, 4);
    if (type == DataType::kBF16) *reinterpret_cast<BF16*>(to) = BF16::Round(value);
    if (type == DataType::kF16) *reinterpret_cast<F16*>(to) = F16::Round(value);
    if (IsByteFloat(type)) *to = static_cast<char>((rng() & 0x80) | (0x30 + rng() % 16));
  }
}

// Rows of a matrix with gaps between them, at an address with the alignment of a device's.
struct Operand {
  Operand(DataType type, int64_t rows, int64_t columns, bool transposed, int64_t room)
      : bytes((transposed ? columns : rows) * ((transposed ? rows : columns) + room) *
                  ElementBytes(type) +
              256) {
    Fill(type, &bytes);
    auto begin = reinterpret_cast<uintptr_t>(bytes.data());
    matrix.data = bytes.data() + (256 - begin % 256) % 256;
    matrix.type = type;
    matrix.pitch = (transposed ? rows : columns) + room;
    matrix.transposed = transposed;
  }
  double operator()(int64_t row, int64_t column) const {
    const int64_t i = matrix.transposed ? column * matrix.pitch + row : row * matrix.pitch + column;
    return ValueOf(matrix.type, matrix.data, i);
  }

  std::vector<char> bytes;
  Matrix matrix;
};

double Gelu(double z) {
  return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
}

double Slope(double z) {  // by a difference: not the formula under test
  constexpr double h = 1e-5;
  return (Gelu(z + h) - Gelu(z - h)) / (2 * h);
}

double Tolerance(DataType type, double value) {
  const double relative = type == DataType::kF32 ? 1e-5 : type == DataType::kF16 ? 1e-3 : 8e-3;
  return relative * (1 + std::abs(value));
}

enum class Kind { kPlain, kBias, kGelu, kGeluAlone, kBiasGelu, kGeluGradient };

struct Case {
  DataType a, b, c;
  int64_t m = 5, n = 16, k = 32;
  bool a_transposed = false, b_transposed = false;
  Kind kind = Kind::kPlain;
  Scaling scaling = Scaling::kNone;
  int64_t first_row = 0;  // only a part is multiplied
};

LtResources Resources() { return {0, workspace, kWorkspace, nullptr}; }

int num_epilogues = 0;

// The kernel's work, on the host.
void ApplyEpilogue(const GemmTask& task, const char* sums, int64_t pitch) {
  ++num_epilogues;
  const Epilogue& e = task.epilogue;
  const auto store = [&](char* to, int64_t i, double value) {
    if (task.c_type == DataType::kF32) reinterpret_cast<float*>(to)[i] = static_cast<float>(value);
    if (task.c_type == DataType::kBF16) reinterpret_cast<BF16*>(to)[i] = BF16::Round(value);
    if (task.c_type == DataType::kF16) reinterpret_cast<F16*>(to)[i] = F16::Round(value);
  };
  for (int64_t i = 0; i < task.m; ++i) {
    for (int64_t j = 0; j < task.n; ++j) {
      double z = reinterpret_cast<const float*>(sums)[i * pitch + j];
      const int64_t at = i * task.c_pitch + j;
      if (e.bias) z += ValueOf(task.c_type, e.bias, j);
      if (e.pre_gelu) store(e.pre_gelu, at, z);
      if (e.gelu_input) {
        z *= Slope(ValueOf(task.c_type, e.gelu_input, at));
      } else if (e.gelu) {
        z = Gelu(z);
      }
      store(task.c, at, z);
    }
  }
}

void IsRight(const Case& c) {
  Operand a(c.a, c.m + c.first_row, c.k, c.a_transposed, c.scaling == Scaling::kNone ? 3 : 0);
  Operand b(c.b, c.k, c.n, c.b_transposed, c.scaling == Scaling::kNone ? 5 : 0);
  Operand out(c.c, c.m + c.first_row, c.n, false, 0), bias(c.c, 1, c.n, false, 0);
  Operand aux(c.c, c.m + c.first_row, c.n, false, 0);
  const float scale_a = 0.5f, scale_b = 3;
  const int64_t blocks = (c.k + 31) / 32, lines_a = (c.m + 127) / 128 * 128,
                lines_b = (c.n + 127) / 128 * 128, padded = (blocks + 3) / 4 * 4;
  std::vector<char> scales_a(lines_a * padded), scales_b(lines_b * padded);
  std::vector<char> tiles_a(scales_a.size()), tiles_b(scales_b.size());
  GemmTask task;
  task.m = c.m + c.first_row;
  task.n = c.n;
  task.k = c.k;
  task.a = a.matrix;
  task.b = b.matrix;
  task.c = const_cast<char*>(out.matrix.data);
  task.c_type = c.c;
  task.c_pitch = c.n;
  const bool has_bias = c.kind == Kind::kBias || c.kind == Kind::kBiasGelu;
  const bool has_gelu = c.kind != Kind::kPlain && c.kind != Kind::kBias;
  if (has_bias) task.epilogue.bias = bias.matrix.data;
  task.epilogue.gelu = has_gelu;
  if (c.kind == Kind::kGeluGradient) {
    task.epilogue.gelu_input = aux.matrix.data;
  } else if (has_gelu && c.kind != Kind::kGeluAlone) {
    task.epilogue.pre_gelu = const_cast<char*>(aux.matrix.data);
  }
  std::vector<double> gelu_input(c.m * c.n);
  for (int64_t i = 0; i < c.m * c.n; ++i) {
    gelu_input[i] = aux(c.first_row + i / c.n, i % c.n);
  }
  if (c.scaling == Scaling::kTensor) {
    task.a.scales.data = reinterpret_cast<const char*>(&scale_a);
    task.b.scales.data = reinterpret_cast<const char*>(&scale_b);
  } else if (c.scaling == Scaling::kBlocks) {
    for (char& byte : scales_a) byte = static_cast<char>(125 + rng() % 5);
    for (char& byte : scales_b) byte = static_cast<char>(125 + rng() % 5);
    SwizzleScales({scales_a.data(), padded, false}, c.m, blocks, tiles_a.data());
    SwizzleScales({scales_b.data(), padded, false}, c.n, blocks, tiles_b.data());
    task.a.scales = {tiles_a.data(), true};
    task.b.scales = {tiles_b.data(), true};
  }
  if (c.first_row > 0) {
    task = task.FromRow(c.first_row);
    task.m = c.m;
  }
  CHECK(LtHasEpilogue(task));
  num_epilogues = 0;
  const Status status = MultiplyWithLt("gemm", task, {}, Resources(), nullptr, ApplyEpilogue);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message.c_str());
  CHECK(status.ok());
  const auto scale = [&](const std::vector<char>& scales, int64_t line, int64_t l) {
    return std::ldexp(1.0, static_cast<uint8_t>(scales[line * padded + l / 32]) - 127);
  };
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      double z = 0;
      for (int64_t l = 0; l < c.k; ++l) {
        double term = a(c.first_row + i, l) * b(l, j);
        if (c.scaling == Scaling::kTensor) term *= scale_a * scale_b;
        if (c.scaling == Scaling::kBlocks) term *= scale(scales_a, i, l) * scale(scales_b, j, l);
        z += term;
      }
      if (has_bias) z += bias(0, j);
      double expected = z;
      if (c.kind == Kind::kGeluGradient) {
        expected = z * Slope(gelu_input[i * c.n + j]);
      } else if (has_gelu) {
        expected = Gelu(z);
        if (c.kind != Kind::kGeluAlone) {
          CHECK(std::abs(aux(c.first_row + i, j) - z) <= Tolerance(c.c, z));
        }
      }
      const double got = out(c.first_row + i, j);
      if (!(std::abs(got - expected) <= Tolerance(c.c, expected))) {
        std::fprintf(stderr, "types %d %d %d, kind %d: [%d, %d]: got %g, expected %g\n",
                     static_cast<int>(c.a), static_cast<int>(c.b), static_cast<int>(c.c),
                     static_cast<int>(c.kind), static_cast<int>(i), static_cast<int>(j), got,
                     expected);
        CHECK(false);
      }
    }
  }
}

void WideOperands() {
  for (const DataType type : {DataType::kF32, DataType::kBF16, DataType::kF16}) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        for (const Kind kind : {Kind::kPlain, Kind::kBias, Kind::kGelu, Kind::kGeluAlone,
                                Kind::kBiasGelu, Kind::kGeluGradient}) {
          const bool has_gelu = kind != Kind::kPlain && kind != Kind::kBias;
          if (has_gelu && type == DataType::kF32) continue;  // by this package's own kernel
          Case c{type, type, type};
          c.a_transposed = a_transposed;
          c.b_transposed = b_transposed;
          c.kind = kind;
          IsRight(c);
          c.first_row = 3;  // less aligned addresses
          c.kind = kind == Kind::kGelu || kind == Kind::kBiasGelu ? Kind::kGeluAlone : kind;
          if (kind == Kind::kGeluGradient) continue;
          IsRight(c);
        }
        Case partial{type, type, DataType::kF32};  // sums of other ranks
        partial.n = 7;
        partial.k = 3;
        partial.a_transposed = a_transposed;
        partial.b_transposed = b_transposed;
        IsRight(partial);
      }
    }
  }
}

void ScaledOperands() {
  for (const auto& [a, b] :
       {std::pair{DataType::kE4M3, DataType::kE4M3}, std::pair{DataType::kE5M2, DataType::kE4M3},
        std::pair{DataType::kE4M3, DataType::kE5M2}}) {
    for (const DataType out : {DataType::kF32, DataType::kBF16, DataType::kF16}) {
      for (const Scaling scaling : {Scaling::kTensor, Scaling::kBlocks}) {
        Case c{a, b, out};
        c.b_transposed = true;
        c.scaling = scaling;
        c.k = 160;  // more blocks of scales than a tile has
        IsRight(c);
        c.kind = Kind::kBias;
        if (out != DataType::kF32) IsRight(c);
      }
    }
  }
}

GemmTask Task(DataType type, DataType out, int64_t m, int64_t n, int64_t k) {
  alignas(256) static char memory[4096];
  GemmTask task;
  task.m = m;
  task.n = n;
  task.k = k;
  task.a = {memory, type, k};
  task.b = {memory, type, n};
  task.c = memory;
  task.c_type = out;
  task.c_pitch = n;
  return task;
}

Status Describe(const GemmTask& task, LtProduct* product, LtOptions options = {}) {
  return DescribeLtProduct("gemm", task, options, product);
}

// What the library cannot multiply is rejected; what this package's kernels do is left to them.
void WhatTheLibraryCannotDo() {
  LtProduct product;
  GemmTask task = Task(DataType::kF32, DataType::kBF16, 4, 8, 8);
  CHECK(Contains(Describe(task, &product), "on GPUs operands and result of these element types"));
  task = Task(DataType::kE4M3, DataType::kBF16, 4, 16, 16);
  CHECK(Contains(Describe(task, &product), "only along their lines"));
  task.b.transposed = true;
  CHECK(Describe(task, &product).ok());
  task.k = 24;
  CHECK(Contains(Describe(task, &product), "multiples of 16, here 24 and 16"));
  task = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  task.more.push_back({8, task.a, task.b});
  CHECK(Contains(Describe(task, &product), "operands of several ranks"));

  task = Task(DataType::kBF16, DataType::kBF16, 4, 12, 8);
  task.epilogue.gelu = true;
  task.epilogue.pre_gelu = task.c;
  CHECK(!LtHasEpilogue(task));  // lines of 12
  CHECK(Describe(task, &product).ok());
  CHECK(product.epilogue == lt::kDefault && product.d.type == lt::kR32F);
  task.epilogue.pre_gelu = nullptr;
  CHECK(LtHasEpilogue(task));
  task = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  task.epilogue.bias = task.c;
  CHECK(LtHasEpilogue(task));
  task.epilogue.gelu = true;
  CHECK(!LtHasEpilogue(task));  // its tanh may be an approximation
  CHECK(Describe(task, &product).ok());
  CHECK(product.epilogue == lt::kDefault && product.bias == nullptr);
  task.epilogue = {};
  task.epilogue.gelu = true;
  task.epilogue.gelu_input = task.c;
  CHECK(!LtHasEpilogue(task));
  task = Task(DataType::kBF16, DataType::kF32, 4, 8, 8);
  task.epilogue.bias = task.c;
  CHECK(!LtHasEpilogue(task));
  task = Task(DataType::kE4M3, DataType::kBF16, 4, 16, 16);
  task.epilogue.gelu = true;
  CHECK(!LtHasEpilogue(task));
}

void WhatIsAskedFor() {
  LtProduct product;
  const GemmTask wide = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  CHECK(Describe(wide, &product).ok() && product.compute_type == lt::kCompute32F);
  CHECK(Describe(wide, &product, {true, true, 116}).ok());
  CHECK(product.compute_type == lt::kCompute32FFastTF32 && product.num_sms == 116);
  GemmTask narrow = Task(DataType::kE4M3, DataType::kF32, 4, 16, 16);
  narrow.b.transposed = true;
  CHECK(Describe(narrow, &product).ok() && product.accumulates_fast);
  CHECK(Describe(narrow, &product, {false, true, 0}).ok() && !product.accumulates_fast);
  const GemmTask half = Task(DataType::kBF16, DataType::kBF16, 4, 8, 8);
  CHECK(Describe(half, &product, {true, true, 0}).ok() && product.compute_type == lt::kCompute32F);
}

// Where the library finds nothing, fewer wishes remain: no call fails for lack of an algorithm.
void WithoutAnAlgorithm(void* library) {
  auto* refuses_epilogues = static_cast<bool*>(dlsym(library, "fake_refuses_epilogues"));
  auto* refuses_alignments = static_cast<bool*>(dlsym(library, "fake_refuses_alignments"));
  auto* refuses_all = static_cast<bool*>(dlsym(library, "fake_refuses_all"));
  CHECK(refuses_epilogues && refuses_alignments && refuses_all);
  Case c{DataType::kBF16, DataType::kBF16, DataType::kBF16};
  c.m = 13;
  c.n = 44;
  c.kind = Kind::kBias;
  *refuses_epilogues = true;
  IsRight(c);
  CHECK(num_epilogues == 3);  // 5 rows of 44 sums at a time
  for (const bool transposed : {false, true}) {
    Case gelu = c;
    gelu.n = 48;
    gelu.a_transposed = transposed;
    gelu.kind = Kind::kBiasGelu;
    IsRight(gelu);
    CHECK(num_epilogues == 3);
  }
  *refuses_alignments = true;
  c.k = 24;  // other shapes: algorithms, and that there are none, are remembered
  IsRight(c);
  CHECK(num_epilogues == 3);
  Case six{DataType::kBF16, DataType::kBF16, DataType::kBF16};
  six.n = 6;
  IsRight(six);
  CHECK(num_epilogues == 1);
  for (const Scaling scaling : {Scaling::kTensor, Scaling::kBlocks}) {
    Case narrow{DataType::kE4M3, DataType::kE4M3, DataType::kBF16};
    narrow.n = 32;
    narrow.b_transposed = true;
    narrow.scaling = scaling;
    narrow.kind = Kind::kBias;
    IsRight(narrow);
    CHECK(num_epilogues == 1);
  }
  *refuses_epilogues = *refuses_alignments = false;
  const int64_t known = CublasLt::Get().num_chosen();
  IsRight(six);  // remembered, not asked for again
  CHECK(num_epilogues == 1 && CublasLt::Get().num_chosen() == known);
  *refuses_all = true;
  GemmTask task = Task(DataType::kBF16, DataType::kBF16, 3, 10, 8);
  CHECK(Contains(MultiplyWithLt("gemm", task, {}, Resources(), nullptr, ApplyEpilogue),
                 "gemm: cuBLASLt has no algorithm (status 15) for [3, 8] times [.., 10] with"));
  *refuses_all = false;
}

void AnAlgorithmIsChosenOnceForAShape() {
  LtProduct product;
  const auto multiply = [&](GemmTask task) {
    task.c = workspace;  // anywhere
    CHECK(Describe(task, &product).ok());
    LtResources resources = Resources();
    resources.workspace_bytes = 0;
    CHECK(CublasLt::Get().Multiply("gemm", product, resources).ok());
    return CublasLt::Get().num_chosen();
  };
  const int64_t first = multiply(Task(DataType::kF32, DataType::kF32, 4, 8, 8));
  CHECK(multiply(Task(DataType::kF32, DataType::kF32, 4, 8, 8)) == first);
  CHECK(multiply(Task(DataType::kF32, DataType::kF32, 3, 8, 8)) == first + 1);
  GemmTask moved = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  moved.a.data += 4;  // its address is less aligned
  CHECK(multiply(moved) == first + 2);
}

}  // namespace
}  // namespace cpd

int main(int, char** arguments) {
  using cpd::CublasLt;
  CHECK(cpd::Contains(CublasLt::Get().Open("gemm", "/nowhere.so"),
                      "gemm: cuBLASLt cannot be opened (/nowhere.so"));
  CHECK(cpd::Contains(CublasLt::Get().Open("gemm", "libm.so.6"), "has no cublasLtMatmul"));
  const std::string program = arguments[0];
  const std::string fake = program.substr(0, program.find_last_of('/') + 1) + "libfake_cublaslt.so";
  CHECK(CublasLt::Get().Open("gemm", fake.c_str()).ok());
  CHECK(CublasLt::Get().Prepare("gemm", 0).ok());
  cpd::WideOperands();
  cpd::ScaledOperands();
  cpd::WhatTheLibraryCannotDo();
  cpd::WhatIsAskedFor();
  cpd::AnAlgorithmIsChosenOnceForAShape();
  cpd::WithoutAnAlgorithm(dlopen(fake.c_str(), RTLD_NOW | RTLD_NOLOAD));
  std::puts("ok");
  return 0;
}
