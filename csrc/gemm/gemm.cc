// Matrix products on CPU: float32 accumulation, narrow types widened block by block.
#include "gemm/gemm.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <vector>

#include "gemm/blas.h"
#include "transport/completion_pool.h"

namespace cpd {
namespace {

// Blocks that are widened before they are multiplied: small beside the operands, large beside what
// the library packs again.
constexpr int64_t kBlockM = 512, kBlockN = 1024, kBlockK = 512;

template <typename In, typename Wide>
void Widen(const char* from, int64_t from_pitch, int64_t num_rows, int64_t num_columns, Wide* to) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const In* row = reinterpret_cast<const In*>(from) + i * from_pitch;
    for (int64_t j = 0; j < num_columns; ++j) {
      to[i * num_columns + j] = static_cast<Wide>(row[j]);
    }
  }
}

// One block of an operand in the wide type: where it lies, if it is wide already, or widened.
template <typename Wide>
struct Operand {
  const Wide* data;
  int64_t pitch;
};

template <typename Wide>
Operand<Wide> TakeBlock(const Matrix& matrix, int64_t row, int64_t num_rows, int64_t column,
                        int64_t num_columns, std::vector<Wide>* scratch) {
  const Matrix block = matrix.FromRow(row).FromColumn(column);
  if (ElementBytes(matrix.type) == sizeof(Wide)) {
    return {reinterpret_cast<const Wide*>(block.data), matrix.pitch};
  }
  const int64_t lines = matrix.transposed ? num_columns : num_rows;
  const int64_t length = matrix.transposed ? num_rows : num_columns;
  scratch->resize(std::max<size_t>(scratch->size(), lines * length));
  if (matrix.type == DataType::kBF16) {
    Widen<BF16>(block.data, matrix.pitch, lines, length, scratch->data());
  } else {
    Widen<F16>(block.data, matrix.pitch, lines, length, scratch->data());
  }
  return {scratch->data(), length};
}

template <typename Out, typename Wide>
void Store(const Wide* from, const Out* bias, int64_t n, Out* to) {
  for (int64_t j = 0; j < n; ++j) {
    const Wide value = bias ? from[j] + static_cast<Wide>(bias[j]) : from[j];
    if constexpr (std::is_arithmetic_v<Out>) {
      to[j] = static_cast<Out>(value);
    } else {
      to[j] = Out::Round(static_cast<float>(value));
    }
  }
}

template <typename Wide>
void StoreAs(DataType type, const Wide* from, const char* bias, int64_t n, char* to) {
  const auto store = [&](auto* out) {
    using Out = std::remove_pointer_t<decltype(out)>;
    Store<Out, Wide>(from, reinterpret_cast<const Out*>(bias), n, out);
  };
  switch (type) {
    case DataType::kBF16:
      return store(reinterpret_cast<BF16*>(to));
    case DataType::kF16:
      return store(reinterpret_cast<F16*>(to));
    case DataType::kF32:
      return store(reinterpret_cast<float*>(to));
    default:
      return store(reinterpret_cast<double*>(to));
  }
}

// Whether one call of the library does it: nothing to widen, nothing to round.
template <typename Wide>
bool IsDirect(const GemmTask& task) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Wide));
  return ElementBytes(task.a.type) == kBytes && ElementBytes(task.b.type) == kBytes &&
         ElementBytes(task.c_type) == kBytes;
}

template <typename Wide>
void GemmIn(const GemmTask& task) {
  const int64_t c_bytes = ElementBytes(task.c_type);
  if (IsDirect<Wide>(task)) {
    Multiply(Product<Wide>{task.a.transposed, task.b.transposed, task.m, task.n, task.k,
                           reinterpret_cast<const Wide*>(task.a.data), task.a.pitch,
                           reinterpret_cast<const Wide*>(task.b.data), task.b.pitch, Wide{0},
                           reinterpret_cast<Wide*>(task.c), task.c_pitch});
    for (int64_t i = 0; task.bias != nullptr && i < task.m; ++i) {
      char* row = task.c + i * task.c_pitch * c_bytes;
      StoreAs<Wide>(task.c_type, reinterpret_cast<Wide*>(row), task.bias, task.n, row);
    }
    return;
  }
  // Sums stand in the result, where that is wide, or else in a block that is then rounded.
  const bool in_place = c_bytes == static_cast<int64_t>(sizeof(Wide));
  thread_local std::vector<Wide> a_scratch, b_scratch, sums_scratch;
  for (int64_t j = 0; j < task.n; j += kBlockN) {
    const int64_t n = std::min(kBlockN, task.n - j);
    const auto b_block = [&](int64_t l) {
      return TakeBlock(task.b, l, std::min(kBlockK, task.k - l), j, n, &b_scratch);
    };
    const auto multiply = [&](int64_t i, int64_t l, const Operand<Wide>& b) {
      const int64_t m = std::min(kBlockM, task.m - i), k = std::min(kBlockK, task.k - l);
      const auto a = TakeBlock(task.a, i, m, l, k, &a_scratch);
      char* c = task.c + (i * task.c_pitch + j) * c_bytes;
      if (!in_place) sums_scratch.resize(std::max<size_t>(sums_scratch.size(), m * n));
      Wide* sums = in_place ? reinterpret_cast<Wide*>(c) : sums_scratch.data();
      const int64_t pitch = in_place ? task.c_pitch : n;
      Multiply(Product<Wide>{task.a.transposed, task.b.transposed, m, n, k, a.data, a.pitch, b.data,
                             b.pitch, Wide(l == 0 ? 0 : 1), sums, pitch});
      if (l + k < task.k || (in_place && task.bias == nullptr)) return;
      for (int64_t row = 0; row < m; ++row) {
        StoreAs<Wide>(task.c_type, sums + row * pitch,
                      task.bias ? task.bias + j * c_bytes : nullptr, n,
                      c + row * task.c_pitch * c_bytes);
      }
    };
    if (in_place || task.k <= kBlockK) {  // each block of b is widened once
      for (int64_t l = 0; l < task.k; l += kBlockK) {
        const auto b = b_block(l);
        for (int64_t i = 0; i < task.m; i += kBlockM) multiply(i, l, b);
      }
    } else {
      for (int64_t i = 0; i < task.m; i += kBlockM) {
        for (int64_t l = 0; l < task.k; l += kBlockK) multiply(i, l, b_block(l));
      }
    }
  }
}

// A sum of nothing, and the bias.
void StoreNothing(const GemmTask& task) {
  const std::vector<double> zeros(task.n);  // as many bytes as float32 needs, and more
  for (int64_t i = 0; i < task.m; ++i) {
    AddBiasAndRound(reinterpret_cast<const char*>(zeros.data()), task.bias, task.n, task.c_type,
                    task.c + i * task.c_pitch * ElementBytes(task.c_type));
  }
}

void RunPart(const GemmTask& task) {
  if (task.m == 0 || task.n == 0) return;
  if (task.k == 0) return StoreNothing(task);
  if (AccumulationType(task.a.type) == DataType::kF64) {
    GemmIn<double>(task);
  } else {
    GemmIn<float>(task);
  }
}

// Part `index` of `count`, cut along the longer side of the result.
GemmTask Part(const GemmTask& task, int index, int count) {
  const bool by_rows = task.m >= task.n;
  const int64_t size = by_rows ? task.m : task.n;
  const int64_t begin = size * index / count, end = size * (index + 1) / count;
  const int64_t c_bytes = ElementBytes(task.c_type);
  GemmTask part = task;
  if (by_rows) {
    part.m = end - begin;
    part.a = task.a.FromRow(begin);
    part.c += begin * task.c_pitch * c_bytes;
  } else {
    part.n = end - begin;
    part.b = task.b.FromColumn(begin);
    part.c += begin * c_bytes;
    if (part.bias != nullptr) part.bias += begin * c_bytes;
  }
  return part;
}

CompletionPool& Workers() {
  static auto* pool = new CompletionPool;
  return *pool;
}

}  // namespace

Matrix Matrix::FromRow(int64_t row) const {
  Matrix rest = *this;
  rest.data += row * (transposed ? 1 : pitch) * ElementBytes(type);
  return rest;
}

Matrix Matrix::FromColumn(int64_t column) const {
  Matrix rest = *this;
  rest.data += column * (transposed ? pitch : 1) * ElementBytes(type);
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
  return is_narrow(a) && is_narrow(b) && is_narrow(c);
}

void RunGemm(const GemmTask& task, int num_threads) {
  // A part should be worth its thread.
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

void AddBiasAndRound(const char* source, const char* bias, int64_t num_elements, DataType type,
                     char* out) {
  if (type == DataType::kF64) {
    StoreAs(type, reinterpret_cast<const double*>(source), bias, num_elements, out);
  } else {
    StoreAs(type, reinterpret_cast<const float*>(source), bias, num_elements, out);
  }
}

}  // namespace cpd
