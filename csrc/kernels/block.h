// A block of threads and its memory: a thread block of a GPU or, in tests, threads of the host.
//
// Everything in this folder is written for a block, so that the same code runs on a GPU and, under
// the sanitizers, without one.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CPD_DEVICE __device__ __forceinline__
#define CPD_UNROLL _Pragma("unroll")
#define CPD_NO_UNROLL _Pragma("unroll 1")  // saves registers where unrolling gains nothing
#else
#include <chrono>
#include <thread>
#define CPD_DEVICE inline
#define CPD_UNROLL
#define CPD_NO_UNROLL
#endif

namespace cpd {

constexpr int kMaxThreads = 256;  // of a block that moves data
constexpr int kMoveBlocks = 2;    // of these on one multiprocessor, at least
constexpr int kWarpThreads = 32;
#ifdef __CUDACC__
constexpr int kMaxWarps = kMaxThreads / kWarpThreads;  // of a block
#else
constexpr int kMaxWarps = kMaxThreads;  // see WarpOf
#endif

#ifndef __CUDACC__
// The equivalent of `__syncthreads()`.
class BlockBarrier {
 public:
  virtual ~BlockBarrier() = default;
  virtual void Wait() = 0;
};
#endif

// One thread's view of its block.
struct Block {
  int thread;
  int num_threads;
  int index;  // of the block among the blocks of its rank
  int num_blocks;
#ifdef __CUDACC__
  bool is_warp = false;
  CPD_DEVICE void Sync() const {
    if (is_warp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
#else
  BlockBarrier* barrier;
  void Sync() const {
    if (num_threads > 1) barrier->Wait();
  }
#endif
};

// A warp of a rank's only block, as one of several blocks. A warp of the host is one thread.
CPD_DEVICE Block WarpOf(const Block& block) {
#ifdef __CUDACC__
  return {block.thread % kWarpThreads, kWarpThreads, block.thread / kWarpThreads,
          block.num_threads / kWarpThreads, true};
#else
  return {0, 1, block.thread, block.num_threads, nullptr};
#endif
}

// A pointer read from memory, of which the compiler cannot know that it is not the block's memory:
// faster loads and stores.
template <typename T>
CPD_DEVICE T* Global(T* p) {
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// ---- Memory that other GPUs see. A release makes visible all writes of the block before its last
// Sync, and those of earlier kernels on the stream (causality order is transitive).

CPD_DEVICE uint64_t LoadAcquire(const uint64_t* p) {
#ifdef __CUDACC__
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
#else
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#endif
}

CPD_DEVICE void StoreRelease(uint64_t* p, uint64_t value) {
#ifdef __CUDACC__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
#else
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
#endif
}

// A word that another GPU may be writing or reading at this time: no order, but one value or the
// other.
CPD_DEVICE uint64_t LoadRelaxed(const uint64_t* p) {
#ifdef __CUDACC__
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p));
  return value;
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

CPD_DEVICE void StoreRelaxed(uint64_t* p, uint64_t value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
#else
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
#endif
}

// Adds and returns the sum. A release and an acquire in one, as above.
CPD_DEVICE uint64_t AddAndFetch(uint64_t* p, uint64_t value) {
#ifdef __CUDACC__
  uint64_t before;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(p), "l"(value)
               : "memory");
  return before + value;
#else
  return __atomic_add_fetch(p, value, __ATOMIC_ACQ_REL);
#endif
}

// ---- Memory of this rank or block only, read after the next Sync or by a later kernel. No fence.

CPD_DEVICE void Add(uint64_t* p, uint64_t value) {
#ifdef __CUDACC__
  atomicAdd(reinterpret_cast<unsigned long long*>(p), value);
#else
  __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
#endif
}

// Called by all threads of a block: one addition per warp.
CPD_DEVICE void AddOfAll(uint32_t* p, uint32_t mine) {
#ifdef __CUDACC__
  const uint32_t sum = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(p, sum);
#else
  __atomic_fetch_add(p, mine, __ATOMIC_RELAXED);
#endif
}

// A place in a list, by its length.
CPD_DEVICE uint32_t Append(uint32_t* length) {
#ifdef __CUDACC__
  return atomicAdd(length, 1u);
#else
  return __atomic_fetch_add(length, 1, __ATOMIC_RELAXED);
#endif
}

CPD_DEVICE uint64_t Append(uint64_t* length) {
#ifdef __CUDACC__
  return atomicAdd(reinterpret_cast<unsigned long long*>(length), 1ull);
#else
  return __atomic_fetch_add(length, 1, __ATOMIC_RELAXED);
#endif
}

CPD_DEVICE void Lower(uint64_t* p, uint64_t value) {
#ifdef __CUDACC__
  atomicMin(reinterpret_cast<unsigned long long*>(p), value);
#else
  uint64_t seen = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(p, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// ---- Time.

CPD_DEVICE uint64_t Nanoseconds() {
#ifdef __CUDACC__
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
#endif
}

CPD_DEVICE void Pause() {
#ifdef __CUDACC__
  __nanosleep(100);
#else
  std::this_thread::yield();
#endif
}

}  // namespace cpd
