// GEMMs on the CPU: of matrices of one type, or of groups of rows.
#include "gemm/gemm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <type_traits>

#include "gemm/blas.h"
#include "transport/completion_pool.h"

namespace cpd {

// ---- Operands of a product in memory, and blocks of them as floats.

namespace {

template <typename In, typename Wide>
void Widen(const Matrix& block, int64_t num_lines, int64_t length, Wide* to) {
  for (int64_t i = 0; i < num_lines; ++i) {
    const In* line = reinterpret_cast<const In*>(block.data) + i * block.pitch;
    for (int64_t j = 0; j < length; ++j) to[i * length + j] = static_cast<Wide>(line[j]);
  }
}

template <typename In>
const float* ValuesOfBytes() {
  static const auto values = [] {
    std::array<float, 256> of_byte;
    for (int byte = 0; byte < 256; ++byte) of_byte[byte] = In{static_cast<uint8_t>(byte)};
    return of_byte;
  }();
  return values.data();
}

// The scale of byte b as two factors: 2^-127 is subnormal and may be flushed to zero.
struct BlockScale {
  explicit BlockScale(char data)
      : first(data == 0 ? 0.5f : 1.0f), second(FromBits(Bits(static_cast<uint8_t>(data)))) {}

  float operator*(float value) const { return value * first * second; }

  static uint32_t Bits(uint8_t byte) {
    if (byte == 255) return 0x7fc00000;
    return uint32_t{byte == 0 ? uint8_t{1} : byte} << 23;
  }

  float first, second;
};

template <typename In>
void WidenScaled(const Matrix& block, int64_t num_lines, int64_t length, float* to) {
  const float* values = ValuesOfBytes<In>();
  const Scales& scales = block.scales;
  for (int64_t i = 0; i < num_lines; ++i) {
    const auto* line = reinterpret_cast<const uint8_t*>(block.data) + i * block.pitch;
    float* out = to + i * length;
    if (!scales.is_blocks) {
      const float scale = scales.data ? *reinterpret_cast<const float*>(scales.data) : 1;
      for (int64_t j = 0; j < length; ++j) out[j] = values[line[j]] * scale;
    } else if (scales.across_lines) {
      const char* of_line =
          scales.data + (scales.line + i) / Scales::kBlock * scales.pitch + scales.position;
      for (int64_t j = 0; j < length; ++j) out[j] = BlockScale(of_line[j]) * values[line[j]];
    } else {
      const char* of_line = scales.data + (scales.line + i) * scales.pitch;
      for (int64_t j = 0; j < length;) {
        const int64_t index = (scales.position + j) / Scales::kBlock;
        const int64_t end = std::min(length, (index + 1) * Scales::kBlock - scales.position);
        const BlockScale scale(of_line[index]);
        for (; j < end; ++j) out[j] = scale * values[line[j]];
      }
    }
  }
}

void WidenTo(const Matrix& block, int64_t num_lines, int64_t length, float* to) {
  switch (block.type) {
    case DataType::kE4M3: return WidenScaled<E4M3>(block, num_lines, length, to);
    case DataType::kE5M2: return WidenScaled<E5M2>(block, num_lines, length, to);
    case DataType::kBF16: return Widen<BF16>(block, num_lines, length, to);
    default: return Widen<F16>(block, num_lines, length, to);
  }
}

void WidenTo(const Matrix&, int64_t, int64_t, double*) {}  // float64 has no narrow type

}  // namespace

Matrix Matrix::FromRow(int64_t row) const {
  Matrix rest = *this;
  rest.data += row * (transposed ? 1 : pitch) * ElementBytes(type);
  (transposed ? rest.scales.position : rest.scales.line) += row;
  return rest;
}

Matrix Matrix::FromColumn(int64_t column) const {
  Matrix rest = *this;
  rest.data += column * (transposed ? pitch : 1) * ElementBytes(type);
  (transposed ? rest.scales.line : rest.scales.position) += column;
  return rest;
}

template <typename Wide>
WideBlock<Wide> TakeBlock(const Matrix& matrix, int64_t row, int64_t num_rows, int64_t column,
                          int64_t num_columns, std::vector<Wide>* scratch) {
  const Matrix block = matrix.FromRow(row).FromColumn(column);
  if (ElementBytes(matrix.type) == sizeof(Wide)) {
    return {reinterpret_cast<const Wide*>(block.data), matrix.pitch};
  }
  const int64_t num_lines = matrix.transposed ? num_columns : num_rows;
  const int64_t length = matrix.transposed ? num_rows : num_columns;
  scratch->resize(std::max<size_t>(scratch->size(), num_lines * length));
  WidenTo(block, num_lines, length, scratch->data());
  return {scratch->data(), length};
}

template WideBlock<float> TakeBlock(const Matrix&, int64_t, int64_t, int64_t, int64_t,
                                    std::vector<float>*);
template WideBlock<double> TakeBlock(const Matrix&, int64_t, int64_t, int64_t, int64_t,
                                     std::vector<double>*);

template <typename Wide>
void AddRows(const Matrix& matrix, int64_t num_rows, int64_t num_columns, Wide* out) {
  constexpr int64_t kRows = 64, kColumns = 1024;
  std::vector<Wide> scratch;
  for (int64_t row = 0; row < num_rows; row += kRows) {
    for (int64_t column = 0; column < num_columns; column += kColumns) {
      const int64_t m = std::min(kRows, num_rows - row);
      const int64_t n = std::min(kColumns, num_columns - column);
      const auto block = TakeBlock(matrix, row, m, column, n, &scratch);
      const int64_t by_row = matrix.transposed ? 1 : block.pitch;
      const int64_t by_column = matrix.transposed ? block.pitch : 1;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          out[column + j] += block.data[i * by_row + j * by_column];
        }
      }
    }
  }
}

template void AddRows(const Matrix&, int64_t, int64_t, float*);
template void AddRows(const Matrix&, int64_t, int64_t, double*);

// ---- Epilogues, applied to the sums of a product before they are stored: bias, GELU, its
// derivative.

namespace {

// Minimax quotient of polynomials on the range where tanh is not yet 1 in float32. Unlike
// std::tanh, a loop over it is vectorized.
inline float Tanh(float x) {
  constexpr float kIsOne = 7.90531110763549805f;
  const float z = x * x;
  float above = -2.76076847742355e-16f;
  for (const float a : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f,
                        1.48572235717979e-05f, 6.37261928875436e-04f, 4.89352455891786e-03f}) {
    above = above * z + a;
  }
  float below = 1.19825839466702e-06f;
  for (const float b : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) {
    below = below * z + b;
  }
  return std::abs(x) < kIsOne ? x * above / below : std::copysign(1.0f, x);
}

inline double Tanh(double x) { return std::tanh(x); }

constexpr double kSqrtTwoOverPi = 0.79788456080286535588, kCubic = 0.044715;

template <typename T>
T Gelu(T x) {
  const T u = T(kSqrtTwoOverPi) * (x + T(kCubic) * x * x * x);
  return T(0.5) * x * (1 + Tanh(u));
}

template <typename T>
T GeluDerivative(T x) {
  const T u = T(kSqrtTwoOverPi) * (x + T(kCubic) * x * x * x);
  const T slope = T(kSqrtTwoOverPi) * (1 + T(3 * kCubic) * x * x);
  const T tanh = Tanh(u);
  // For large arguments the second term is 0 times infinity.
  const T bend = (1 - tanh * tanh) * slope;
  return T(0.5) * (1 + tanh) + T(0.5) * x * (tanh * tanh < 1 ? bend : 0);
}

template <typename Out, typename Wide>
Out As(Wide value) {
  if constexpr (std::is_arithmetic_v<Out>) {
    return static_cast<Out>(value);
  } else {
    return Out::Round(static_cast<float>(value));
  }
}

template <typename Out, typename Wide>
void Store(const Wide* sums, const Epilogue& epilogue, int64_t n, Out* to) {
  const auto* bias = reinterpret_cast<const Out*>(epilogue.bias);
  const auto* gelu_input = reinterpret_cast<const Out*>(epilogue.gelu_input);
  auto* pre_gelu = reinterpret_cast<Out*>(epilogue.pre_gelu);
  const auto z = [=](int64_t j) { return bias ? sums[j] + static_cast<Wide>(bias[j]) : sums[j]; };
  if (!epilogue.gelu) {
    for (int64_t j = 0; j < n; ++j) to[j] = As<Out>(z(j));
  } else if (gelu_input) {
    for (int64_t j = 0; j < n; ++j) {
      to[j] = As<Out>(z(j) * GeluDerivative(static_cast<Wide>(gelu_input[j])));
    }
  } else {
    for (int64_t j = 0; j < n; ++j) {
      const Wide value = z(j);
      if (pre_gelu) pre_gelu[j] = As<Out>(value);
      to[j] = As<Out>(Gelu(value));
    }
  }
}

template <typename Wide>
void StoreAs(DataType type, const Wide* sums, const Epilogue& epilogue, int64_t n, char* to) {
  switch (type) {
    case DataType::kBF16: return Store(sums, epilogue, n, reinterpret_cast<BF16*>(to));
    case DataType::kF16: return Store(sums, epilogue, n, reinterpret_cast<F16*>(to));
    case DataType::kF32: return Store(sums, epilogue, n, reinterpret_cast<float*>(to));
    default: return Store(sums, epilogue, n, reinterpret_cast<double*>(to));
  }
}

}  // namespace

Epilogue Epilogue::From(int64_t element, int64_t column, DataType type) const {
  const int64_t bytes = ElementBytes(type);
  Epilogue rest = *this;
  if (bias) rest.bias += column * bytes;
  if (pre_gelu) rest.pre_gelu += element * bytes;
  if (gelu_input) rest.gelu_input += element * bytes;
  return rest;
}

void StoreRow(DataType type, const float* sums, const Epilogue& epilogue, int64_t n, char* to) {
  StoreAs(type, sums, epilogue, n, to);
}

void StoreRow(DataType type, const double* sums, const Epilogue& epilogue, int64_t n, char* to) {
  StoreAs(type, sums, epilogue, n, to);
}

// ---- Matrix products on CPU: float32 accumulation; narrow types are widened block by block.

namespace {

// Size of blocks that are widened before they are multiplied: small compared with the operands,
// large compared with the blocks that the library packs again.
constexpr int64_t kBlockM = 512, kBlockN = 1024, kBlockK = 512;

// The terms with a non-empty contracted dimension, in order.
std::vector<Factors> FactorsOf(const GemmTask& task) {
  std::vector<Factors> all{{task.k, task.a, task.b}};
  all.insert(all.end(), task.more.begin(), task.more.end());
  all.erase(std::remove_if(all.begin(), all.end(), [](const Factors& f) { return f.k == 0; }),
            all.end());
  return all;
}

// A part of the contracted dimension, widened at once.
struct Panel {
  Matrix a, b;
  int64_t begin, k;
};

std::vector<Panel> PanelsOf(const GemmTask& task) {
  std::vector<Panel> panels;
  for (const Factors& f : FactorsOf(task)) {
    for (int64_t l = 0; l < f.k; l += kBlockK) {
      panels.push_back({f.a, f.b, l, std::min(kBlockK, f.k - l)});
    }
  }
  return panels;
}

// Whether the library can compute each product in one call, without widening or rounding.
template <typename Wide>
bool IsDirect(const GemmTask& task) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Wide));
  return ElementBytes(task.a.type) == kBytes && ElementBytes(task.b.type) == kBytes &&
         ElementBytes(task.c_type) == kBytes;
}

template <typename Wide>
void GemmIn(const GemmTask& task) {
  const int64_t c_bytes = ElementBytes(task.c_type);
  const auto store_row = [&](const Wide* sums, int64_t row, int64_t column, int64_t n) {
    const int64_t element = row * task.c_pitch + column;
    StoreRow(task.c_type, sums, task.epilogue.From(element, column, task.c_type), n,
             task.c + element * c_bytes);
  };
  if (IsDirect<Wide>(task)) {
    auto* c = reinterpret_cast<Wide*>(task.c);
    Wide beta{0};
    for (const Factors& f : FactorsOf(task)) {
      Multiply(Product<Wide>{f.a.transposed, f.b.transposed, task.m, task.n, f.k,
                             reinterpret_cast<const Wide*>(f.a.data), f.a.pitch,
                             reinterpret_cast<const Wide*>(f.b.data), f.b.pitch, beta, c,
                             task.c_pitch});
      beta = 1;
    }
    for (int64_t i = 0; !task.epilogue.is_empty() && i < task.m; ++i) {
      store_row(c + i * task.c_pitch, i, 0, task.n);
    }
    return;
  }
  // Sums are stored in the result if it is wide, else in a block that is then rounded.
  const bool in_place = c_bytes == static_cast<int64_t>(sizeof(Wide));
  const std::vector<Panel> panels = PanelsOf(task);
  thread_local std::vector<Wide> a_scratch, b_scratch, sums_scratch;
  for (int64_t j = 0; j < task.n; j += kBlockN) {
    const int64_t n = std::min(kBlockN, task.n - j);
    const auto b_block = [&](const Panel& panel) {
      return TakeBlock(panel.b, panel.begin, panel.k, j, n, &b_scratch);
    };
    const auto multiply = [&](int64_t i, size_t index, const WideBlock<Wide>& b) {
      const Panel& panel = panels[index];
      const int64_t m = std::min(kBlockM, task.m - i);
      const auto a = TakeBlock(panel.a, i, m, panel.begin, panel.k, &a_scratch);
      if (!in_place) sums_scratch.resize(std::max<size_t>(sums_scratch.size(), m * n));
      char* c = task.c + (i * task.c_pitch + j) * c_bytes;
      Wide* sums = in_place ? reinterpret_cast<Wide*>(c) : sums_scratch.data();
      const int64_t pitch = in_place ? task.c_pitch : n;
      Multiply(Product<Wide>{panel.a.transposed, panel.b.transposed, m, n, panel.k, a.data, a.pitch,
                             b.data, b.pitch, Wide(index == 0 ? 0 : 1), sums, pitch});
      if (index + 1 < panels.size() || (in_place && task.epilogue.is_empty())) return;
      for (int64_t row = 0; row < m; ++row) store_row(sums + row * pitch, i + row, j, n);
    };
    if (in_place || panels.size() == 1) {  // widen each block of b only once
      for (size_t index = 0; index < panels.size(); ++index) {
        const auto b = b_block(panels[index]);
        for (int64_t i = 0; i < task.m; i += kBlockM) multiply(i, index, b);
      }
    } else {
      for (int64_t i = 0; i < task.m; i += kBlockM) {
        for (size_t index = 0; index < panels.size(); ++index) {
          multiply(i, index, b_block(panels[index]));
        }
      }
    }
  }
}

// The epilogue of an empty sum.
template <typename Wide>
void StoreNothing(const GemmTask& task) {
  const std::vector<Wide> zeros(task.n);
  for (int64_t i = 0; i < task.m; ++i) {
    const GemmTask row = task.FromRow(i);
    StoreRow(row.c_type, zeros.data(), row.epilogue, row.n, row.c);
  }
}

void RunPart(const GemmTask& task) {
  if (task.m == 0 || task.n == 0) return;
  const bool is_empty = FactorsOf(task).empty();
  if (AccumulationType(task.a.type) == DataType::kF64) {
    (is_empty ? StoreNothing<double> : GemmIn<double>)(task);
  } else {
    (is_empty ? StoreNothing<float> : GemmIn<float>)(task);
  }
}

// Part `index` of `count`, cut along the longer side of the result.
GemmTask Part(const GemmTask& task, int index, int count) {
  const bool by_rows = task.m >= task.n;
  const int64_t size = by_rows ? task.m : task.n;
  const int64_t begin = size * index / count, end = size * (index + 1) / count;
  GemmTask part = by_rows ? task.FromRow(begin) : task.FromColumn(begin);
  (by_rows ? part.m : part.n) = end - begin;
  return part;
}

CompletionPool& Workers() {
  static auto* pool = new CompletionPool;
  return *pool;
}

}  // namespace

GemmTask GemmTask::FromRow(int64_t row) const {
  GemmTask rest = *this;
  rest.a = a.FromRow(row);
  for (Factors& f : rest.more) f.a = f.a.FromRow(row);
  rest.c += row * c_pitch * ElementBytes(c_type);
  rest.epilogue = epilogue.From(row * c_pitch, 0, c_type);
  return rest;
}

GemmTask GemmTask::FromColumn(int64_t column) const {
  GemmTask rest = *this;
  rest.b = b.FromColumn(column);
  for (Factors& f : rest.more) f.b = f.b.FromColumn(column);
  rest.c += column * ElementBytes(c_type);
  rest.epilogue = epilogue.From(column, column, c_type);
  return rest;
}

DataType AccumulationType(DataType type) {
  return type == DataType::kF64 ? DataType::kF64 : DataType::kF32;
}

bool GemmIsSupported(DataType a, DataType b, DataType c) {
  const auto is_narrow = [](DataType type) {
    return type == DataType::kBF16 || type == DataType::kF16 || type == DataType::kF32;
  };
  if (a == DataType::kF64) return b == a && c == a;
  if (IsByteFloat(a) && IsByteFloat(b)) return is_narrow(c) && !(a == DataType::kE5M2 && b == a);
  return is_narrow(a) && is_narrow(b) && is_narrow(c);
}

void RunGemm(const GemmTask& task, int num_threads) {
  // A part should be worth a thread.
  constexpr int64_t kLeast = 64;
  const auto count = static_cast<int>(
      std::clamp<int64_t>(std::max(task.m, task.n) / kLeast, 1, std::max(1, num_threads)));
  if (count == 1) return RunPart(task);
  std::mutex mutex;
  std::condition_variable done;
  int num_open = count;
  std::exception_ptr failure;
  const auto run = [&](int index) {
    std::exception_ptr thrown;
    try {
      RunPart(Part(task, index, count));
    } catch (...) {  // no memory for a block
      thrown = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (thrown) failure = thrown;
    if (--num_open == 0) done.notify_one();
  };
  for (int index = 1; index < count; ++index) Workers().Run([&run, index] { run(index); });
  run(0);
  std::unique_lock<std::mutex> lock(mutex);
  done.wait(lock, [&] { return num_open == 0; });
  if (failure) std::rethrow_exception(failure);
}

// ---- Grouped GEMM: one product per group of rows; group sizes are known only at run time.

namespace {

Scales TensorScale(const float* scales, int64_t group) {
  Scales scale;
  if (scales) scale.data = reinterpret_cast<const char*>(scales + group);
  return scale;
}

GemmTask TaskOf(const GroupedProduct& p, int64_t group, int64_t begin, int64_t num_rows) {
  const int64_t output_bytes = ElementBytes(p.output_type), rhs_bytes = ElementBytes(p.rhs_type);
  const Scales of_lhs = TensorScale(p.lhs_scales, group), of_rhs = TensorScale(p.rhs_scales, group);
  GemmTask task;
  task.n = task.c_pitch = p.n;
  task.c_type = p.output_type;
  const char* rows = p.lhs + begin * p.k * ElementBytes(p.lhs_type);
  task.a = {rows, p.lhs_type, p.k, p.contracts_rows, of_lhs};
  if (p.contracts_rows) {
    task.m = p.k;
    task.k = num_rows;
    task.b = {p.rhs + begin * p.n * rhs_bytes, p.rhs_type, p.n, false, of_rhs};
    task.c = p.output + group * p.k * p.n * output_bytes;
  } else {
    task.m = num_rows;
    task.k = p.k;
    task.b = {p.rhs + group * p.k * p.n * rhs_bytes, p.rhs_type, p.rhs_transposed ? p.k : p.n,
              p.rhs_transposed, of_rhs};
    task.c = p.output + begin * p.n * output_bytes;
    if (p.bias) task.epilogue.bias = p.bias + group * p.n * output_bytes;
  }
  return task;
}

}  // namespace

Status RunGroupedGemm(const std::string& op, const GroupedProduct& p, int num_threads) {
  int64_t total = 0;
  for (int64_t group = 0; group < p.num_groups; ++group) {
    const int64_t size = p.group_sizes[group];
    total += size;
    if (size < 0 || total > p.m) {
      const std::string why = size < 0
                                  ? ", but a group has at least 0 rows."
                                  : ", so that the groups up to it have " + std::to_string(total) +
                                        " rows, but there are " + std::to_string(p.m) + ".";
      return Status::Invalid(op, ": group_sizes[", group, "] is ", size, why,
                             " Pass the rows of each group, in their order.");
    }
  }
  int64_t begin = 0;
  for (int64_t group = 0; group < p.num_groups; ++group) {
    const int64_t size = p.group_sizes[group];
    RunGemm(TaskOf(p, group, begin, size), num_threads);
    begin += size;
  }
  if (!p.contracts_rows) {
    const int64_t row_bytes = p.n * ElementBytes(p.output_type);
    std::fill(p.output + begin * row_bytes, p.output + p.m * row_bytes, 0);
  }
  return Status::Ok();
}

}  // namespace cpd
