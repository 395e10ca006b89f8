// Matrix products on CPU: float32 accumulation; narrow types are widened block by block.
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

template <typename Wide>
void RunPartIn(const GemmTask& task) {
  if (FactorsOf(task).empty()) {
    StoreNothing<Wide>(task);
  } else {
    GemmIn<Wide>(task);
  }
}

void RunPart(const GemmTask& task) {
  if (task.m == 0 || task.n == 0) return;
  if (AccumulationType(task.a.type) == DataType::kF64) {
    RunPartIn<double>(task);
  } else {
    RunPartIn<float>(task);
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

}  // namespace cpd
