// The copy engine of a multiprocessor: bulk copies between global memory and a block's own, for
// kernels/bulk.h. Its instructions need compute capability 9.0.
//
// It accesses memory through the async proxy. Of the orders that this needs:
// - Rows that an earlier kernel, or a rank that has signalled, wrote: the fence of Begin, after the
//   wait for the kernel ahead.
// - A stage that is stored after it was loaded: the barrier of the load.
// - A stage that is loaded again: its store has read it.
// - Rows that are signalled: AwaitStores waits until they are written and visible to the thread
// that
//   then releases the signal; the fence orders them also for what is not an access of this thread.
#pragma once

#include <cstdint>

#include "kernels/block.h"

namespace cpd {

struct BulkEngine {
  static constexpr int64_t kChunkBytes = 8192;
  static constexpr int kNumStages = 4;  // 32 kB: two blocks fit every multiprocessor
  static constexpr int64_t kLeastBytes = 2048;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kExists = true;

  template <typename Scratch>
  static __device__ void Begin(Scratch* scratch) {
    for (uint64_t& full : scratch->full) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Shared(&full)) : "memory");
    }
    Fence();
  }

  template <typename Scratch>
  static __device__ void Load(Scratch* scratch, int stage, const char* from, int64_t bytes) {
    const uint32_t full = Shared(&scratch->full[stage]);
    const auto size = static_cast<uint32_t>(bytes);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(size)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(Shared(scratch->stages[stage])),
        "l"(Address(from)), "r"(size), "r"(full)
        : "memory");
  }

  template <typename Scratch>
  static __device__ void AwaitLoad(Scratch* scratch, int stage, uint32_t parity) {
    const uint32_t full = Shared(&scratch->full[stage]);
    uint32_t is_full = 0;
    while (is_full == 0) {
      asm volatile(
          "{\n"
          ".reg .pred full;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 full, [%1], %2;\n"
          "selp.u32 %0, 1, 0, full;\n"
          "}"
          : "=r"(is_full)
          : "r"(full), "r"(parity)
          : "memory");
    }
  }

  template <typename Scratch>
  static __device__ void Store(char* to, Scratch* scratch, int stage, int64_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(Address(to)),
                 "r"(Shared(scratch->stages[stage])), "r"(static_cast<uint32_t>(bytes))
                 : "memory");
  }

  static __device__ void CloseGroup() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

  template <int kNum>
  static __device__ void AwaitRead() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNum) : "memory");
  }

  static __device__ void AwaitStores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    Fence();
  }

 private:
  static __device__ void Fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
  static __device__ uint32_t Shared(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }
  static __device__ uint64_t Address(const void* p) {
    return static_cast<uint64_t>(__cvta_generic_to_global(p));
  }
#else
  static constexpr bool kExists = false;  // the launcher chooses ByRegisters on such a GPU
#endif
};

}  // namespace cpd
