// Weak memory by relacy: runs a program's threads in many random interleavings. An atomic load may
// return an old value wherever the memory model allows it, and a plain access without an order to
// another one is an error.
//
// weak_memory RUNS: prints "ok", or what was found.
#include "model.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <type_traits>

#include "relacy_only.h"

namespace cpd::model {
namespace {

constexpr size_t kGrain = 4;  // bytes that have a cell
constexpr int kMostCells = 1 << 16, kMostRegions = 64, kMostPending = 64;

using Atomic = rl::generic_atomic<uint64_t, /*strong_init=*/true>;

// The accesses of some bytes so far: plain ones, and the values of atomic ones. The memory itself
// always has the newest value.
struct Cell {
  rl::var_data* plain;
  bool is_atomic;
  uint8_t bytes;  // of atomic accesses, which begin here
  char* at;
  uint64_t first;  // what the memory had before
  std::aligned_storage_t<sizeof(Atomic), alignof(Atomic)> storage;

  Atomic& atomic() { return *std::launder(reinterpret_cast<Atomic*>(&storage)); }
};

struct Region {
  char* begin;
  size_t bytes;
  int first_cell;
};

// A thread's plain store of a cell with atomic accesses: its value is known at the next event.
struct Pending {
  Cell* cells[kMostPending];
  int num = 0;
};

Region regions[kMostRegions];
int num_regions = 0, num_cells = 0, num_used = 0;
Cell cells[kMostCells];
Cell* used[2 * kMostCells];  // in this run; those with both kinds of accesses twice
Pending pending[kThreads];
bool is_running = false;

rl::context& Context() { return rl::ctx(); }

[[noreturn]] void Stop(const char* what) {
  std::fprintf(stderr, "weak_memory: %s\n", what);
  std::abort();
}

// Relacy would make the run again to tell its history, but no run is like another.
[[noreturn]] void Fail(const char* what) {
  std::printf("thread %d: %s\n", Context().threadx_->index_, what);
  std::fflush(stdout);
  std::_Exit(1);
}

Cell* Find(const volatile void* address) {
  const auto* at = static_cast<const char*>(const_cast<const void*>(address));
  for (int r = 0; r < num_regions; ++r) {
    const Region& region = regions[r];
    if (at < region.begin || at >= region.begin + region.bytes) continue;
    return &cells[region.first_cell + (at - region.begin) / kGrain];
  }
  return nullptr;
}

uint64_t Newest(const Cell& cell) {
  uint64_t value = 0;
  std::memcpy(&value, cell.at, cell.bytes);
  return value;
}

void SetNewest(const Cell& cell, uint64_t value) { std::memcpy(cell.at, &value, cell.bytes); }

// The values of the model are relative to the first one.
void TakeStores() {
  Pending& mine = pending[Context().threadx_->index_];
  for (; mine.num > 0; --mine.num) {
    Cell& cell = *mine.cells[mine.num - 1];
    if (!cell.is_atomic) continue;
    Context().disable_preemption();
    cell.atomic().store(Newest(cell) ^ cell.first, rl::mo_relaxed, $);
    Context().enable_preemption();
  }
}

// The block's memory is used again for other things.
void Forget(Cell* cell) {
  if (cell->is_atomic) cell->atomic().~Atomic();
  cell->is_atomic = false;
}

Cell& AtomicCell(const volatile void* address, int bytes) {
  Cell* cell = Find(address);
  if (cell == nullptr) Stop("an atomic access of memory that is not tracked");
  if (cell->is_atomic && cell->bytes != bytes) Forget(cell);
  if (!cell->is_atomic) {
    if (bytes > static_cast<int>(kGrain)) Forget(cell + 1);
    if (cell > cells && cell[-1].is_atomic && cell[-1].bytes > kGrain) Forget(cell - 1);
    if (num_used + 2 > 2 * kMostCells) Stop("too many accesses");
    used[num_used++] = cell;
    cell->is_atomic = true;
    cell->bytes = static_cast<uint8_t>(bytes);
    cell->at = static_cast<char*>(const_cast<void*>(address));
    cell->first = Newest(*cell);
    new (&cell->storage) Atomic;
  }
  return *cell;
}

void Plain(const volatile void* address, size_t bytes, bool is_store) {
  if (!is_running) return;
  TakeStores();
  const auto* at = static_cast<const char*>(const_cast<const void*>(address));
  for (size_t i = 0; i < bytes; i += kGrain) {
    Cell* cell = Find(at + i);
    if (cell == nullptr) return;
    if (cell->plain == nullptr) {
      used[num_used++] = cell;
      cell->plain = Context().var_ctor();
    }
    rl::thread_info_base& thread = *Context().threadx_;
    if (!(is_store ? cell->plain->store(thread) : cell->plain->load(thread))) {
      Fail("two accesses without an order");
    }
    if (!cell->is_atomic) continue;
    if (!is_store) {
      if ((cell->atomic().load(rl::mo_relaxed, $) ^ cell->first) != Newest(*cell)) {
        Fail("a plain load may see an old value");
      }
      continue;
    }
    Pending& mine = pending[thread.index_];
    if (mine.num == kMostPending) Stop("too many stores");
    mine.cells[mine.num++] = cell;
  }
}

uint64_t Load(const volatile void* address, int bytes, int order) {
  TakeStores();
  Cell& cell = AtomicCell(address, bytes);
  return cell.atomic().load(static_cast<rl::memory_order>(order), $) ^ cell.first;
}

void Store(volatile void* address, int bytes, uint64_t value, int order) {
  TakeStores();
  Cell& cell = AtomicCell(address, bytes);
  cell.atomic().store(value ^ cell.first, static_cast<rl::memory_order>(order), $);
  SetNewest(cell, value);
}

// Another thread may change the value when this one is about to: then once more.
template <typename Change>
uint64_t Modify(volatile void* address, int bytes, int order, Change change) {
  TakeStores();
  Cell& cell = AtomicCell(address, bytes);
  for (;;) {
    const uint64_t before = Newest(cell), after = change(before);
    uint64_t seen = before ^ cell.first;
    if (cell.atomic().compare_exchange(rl::bool_t<false>(), seen, after ^ cell.first,
                                       static_cast<rl::memory_order>(order), rl::mo_relaxed, $)) {
      SetNewest(cell, after);
      return before;
    }
  }
}

struct Suite : rl::test_suite<Suite, kThreads> {
  void before() {
    if (num_used > 0) Fail("threads wait without end");  // the run before did not end
    Begin();
    is_running = true;
  }
  void thread(unsigned index) {
    RunThread(static_cast<int>(index));
    TakeStores();
  }
  void after() {
    is_running = false;
    for (; num_used > 0; --num_used) {
      Cell& cell = *used[num_used - 1];
      if (cell.plain != nullptr) Context().var_dtor(cell.plain);
      Forget(&cell);
      cell.plain = nullptr;
    }
  }
};

}  // namespace

void Track(void* begin, size_t bytes) {
  const int num = static_cast<int>((bytes + kGrain - 1) / kGrain);
  if (num_regions == kMostRegions || num_cells + num > kMostCells) Stop("too much memory");
  regions[num_regions++] = {static_cast<char*>(begin), bytes, num_cells};
  num_cells += num;
}

void Require(bool condition, const char* what) {
  if (!condition) Fail(what);
}

void Barrier::Wait() {
  const uint64_t mine = Modify(&arrived_, 8, __ATOMIC_ACQ_REL, [](uint64_t n) { return n + 1; });
  const uint64_t last = (mine / count_ + 1) * count_;
  while (Load(&arrived_, 8, __ATOMIC_ACQUIRE) < last) rl::yield(1, $);
}

}  // namespace cpd::model

// ---- What the compiler inserts, with the names of its sanitizer.

using namespace cpd::model;  // NOLINT

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, size_t bytes) { Plain(at, bytes, false); }
void __tsan_write_range(void* at, size_t bytes) { Plain(at, bytes, true); }

#define CPD_PLAIN(bytes)                                                   \
  void __tsan_read##bytes(void* at) { Plain(at, bytes, false); }           \
  void __tsan_write##bytes(void* at) { Plain(at, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* at) { Plain(at, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* at) { Plain(at, bytes, true); }
CPD_PLAIN(1)
CPD_PLAIN(2)
CPD_PLAIN(4)
CPD_PLAIN(8)
CPD_PLAIN(16)

#define CPD_ATOMIC(bits, type)                                                                    \
  type __tsan_atomic##bits##_load(const volatile type* at, int order) {                           \
    return is_running ? static_cast<type>(Load(at, bits / 8, order)) : *at;                       \
  }                                                                                               \
  void __tsan_atomic##bits##_store(volatile type* at, type value, int order) {                    \
    is_running ? Store(at, bits / 8, value, order) : static_cast<void>(*at = value);              \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_add(volatile type* at, type value, int order) {                \
    return static_cast<type>(                                                                     \
        Modify(at, bits / 8, order, [=](uint64_t n) { return static_cast<type>(n + value); }));   \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_or(volatile type* at, type value, int order) {                 \
    return static_cast<type>(Modify(at, bits / 8, order, [=](uint64_t n) { return n | value; })); \
  }                                                                                               \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* at, type* wanted, type value,  \
                                                    int order, int) {                             \
    const auto before = static_cast<type>(                                                        \
        Modify(at, bits / 8, order, [=](uint64_t n) { return n == *wanted ? value : n; }));       \
    const bool is_equal = before == *wanted;                                                      \
    *wanted = before;                                                                             \
    return is_equal;                                                                              \
  }                                                                                               \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile type* at, type* wanted, type value,    \
                                                  int order, int other) {                         \
    return __tsan_atomic##bits##_compare_exchange_strong(at, wanted, value, order, other);        \
  }
CPD_ATOMIC(32, uint32_t)
CPD_ATOMIC(64, uint64_t)

// What std::this_thread::yield() calls.
int sched_yield() {
  if (is_running) rl::yield(1, $);
  return 0;
}
}

int main(int argc, char** argv) {
  rl::test_params params;
  params.iteration_count = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1000;
  params.execution_depth_limit = 1 << 20;
  params.progress_stream = nullptr;
  std::ostringstream progress;
  params.output_stream = &progress;
  const bool is_fine = rl::simulate<Suite>(params);
  std::puts(is_fine ? "ok" : progress.str().c_str());
  return is_fine ? 0 : 1;
}
