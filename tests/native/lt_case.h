// One product by cuBLASLt against plain sums in float64, with random operands of any type and
// layout.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "gemm/overlap_problem.h"
#include "gpu_schedule/cublaslt.h"
#include "ranks.h"

namespace cpd {

constexpr int64_t kWorkspace = 1024;  // also for sums: of 5 x 44, a few rows at a time
alignas(256) inline char workspace[kWorkspace];

inline std::mt19937 rng(0);

inline float ValueOf(DataType type, const char* data, int64_t i) {
  switch (type) {
    case DataType::kBF16: return reinterpret_cast<const BF16*>(data)[i];
    case DataType::kF16: return reinterpret_cast<const F16*>(data)[i];
    case DataType::kE4M3: return reinterpret_cast<const E4M3*>(data)[i];
    case DataType::kE5M2: return reinterpret_cast<const E5M2*>(data)[i];
    default: return reinterpret_cast<const float*>(data)[i];
  }
}

// Small numbers of any type; for 8-bit types, any byte that is a number of moderate size.
inline void Fill(DataType type, std::vector<char>* data) {
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

inline double Gelu(double z) {
  return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
}

inline double Slope(double z) {  // by a difference: not the formula under test
  constexpr double h = 1e-5;
  return (Gelu(z + h) - Gelu(z - h)) / (2 * h);
}

inline double Tolerance(DataType type, double value) {
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

inline LtResources Resources() { return {0, workspace, kWorkspace, nullptr}; }

inline int num_epilogues = 0;

// The kernel's work, on the host.
inline void ApplyEpilogue(const GemmTask& task, const char* sums, int64_t pitch) {
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

inline void IsRight(const Case& c) {
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

}  // namespace cpd
