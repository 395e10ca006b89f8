// Matrix products of a warpgroup: the four warps of an attention block, with 16 rows of the left
// matrix each. Tensor cores of compute capability 9.0 read the block's memory themselves; only code
// for sm_90a can use this. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
// Instructions".
#pragma once

#include "kernels/warp.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CPD_HAS_WARPGROUPS
#endif

namespace cpd::kernels {

#ifdef CPD_HAS_WARPGROUPS
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

#ifdef CPD_HAS_WARPGROUPS

// Names a matrix in the block's memory: groups of 8 rows of 128 bytes, swizzled, which follow one
// another. `panel_bytes`: from 64 columns to the next 64.
CPD_DEVICE uint64_t DescriptorOf(const uint16_t* matrix, int panel_bytes) {
  constexpr uint64_t kGroupBytes = 1024, kSwizzled = uint64_t{1} << 62;  // by 128 bytes
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(matrix));
  return address >> 4 | static_cast<uint64_t>(panel_bytes >> 4) << 16 | kGroupBytes >> 4 << 32 |
         kSwizzled;
}

#define CPD_SUMS(i)                                                             \
  "+f"(s[i].value[0].x[0]), "+f"(s[i].value[0].x[1]), "+f"(s[i].value[0].x[2]), \
      "+f"(s[i].value[0].x[3])
#define CPD_SUMS4(i) CPD_SUMS(i), CPD_SUMS(i + 1), CPD_SUMS(i + 2), CPD_SUMS(i + 3)
#define CPD_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define CPD_32 CPD_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CPD_64                                                                        \
  CPD_32                                                                              \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CPD_WGMMA(n, type, sums, adds)           \
  "{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds \
  ", 0;\n"                                       \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" sums "}, "
#define CPD_LEFT \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"(int{adds}), "n"(int{kTransposed})
// The left matrix lies in registers, ...
#define CPD_MULTIPLY_REGISTERS(type)                                                        \
  if constexpr (kColumns == 32) {                                                           \
    asm volatile(                                                                           \
        CPD_WGMMA("32", type, CPD_16, "%21") "{%16,%17,%18,%19}, %20, adds, 1, 1, %22;\n}"  \
        : CPD_SUMS4(0)                                                                      \
        : CPD_LEFT);                                                                        \
  } else if constexpr (kColumns == 64) {                                                    \
    asm volatile(                                                                           \
        CPD_WGMMA("64", type, CPD_32, "%37") "{%32,%33,%34,%35}, %36, adds, 1, 1, %38;\n}"  \
        : CPD_SUMS4(0), CPD_SUMS4(4)                                                        \
        : CPD_LEFT);                                                                        \
  } else {                                                                                  \
    asm volatile(                                                                           \
        CPD_WGMMA("128", type, CPD_64, "%69") "{%64,%65,%66,%67}, %68, adds, 1, 1, %70;\n}" \
        : CPD_SUMS4(0), CPD_SUMS4(4), CPD_SUMS4(8), CPD_SUMS4(12)                           \
        : CPD_LEFT);                                                                        \
  }
// ... or in the block's memory.
#define CPD_MULTIPLY_MEMORY(type)                                                    \
  asm volatile(CPD_WGMMA("64", type, CPD_32, "%34") "%32, %33, adds, 1, 1, 0, 0;\n}" \
               : CPD_SUMS4(0), CPD_SUMS4(4)                                          \
               : "l"(left), "l"(right), "r"(int{adds}))

// s [64, kColumns] = left right, or += if it `adds`: 16 columns of the left matrix, which lies in
// registers or, for 64 columns, in the block's memory. Transposed: the columns of the right matrix
// are contiguous.
template <typename Element, int kColumns, bool kTransposed>
CPD_DEVICE void MultiplyAsync(Lanes<Sums>* s, const Four& left, uint64_t right, bool adds) {
  const uint32_t* a = left.pairs;
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128);
  if constexpr (std::is_same_v<Element, BF16>) {
    CPD_MULTIPLY_REGISTERS("bf16")
  } else {
    CPD_MULTIPLY_REGISTERS("f16")
  }
}
template <typename Element>
CPD_DEVICE void MultiplyAsync(Lanes<Sums>* s, uint64_t left, uint64_t right, bool adds) {
  if constexpr (std::is_same_v<Element, BF16>) {
    CPD_MULTIPLY_MEMORY("bf16");
  } else {
    CPD_MULTIPLY_MEMORY("f16");
  }
}

#undef CPD_SUMS
#undef CPD_SUMS4
#undef CPD_16
#undef CPD_32
#undef CPD_64
#undef CPD_WGMMA
#undef CPD_LEFT
#undef CPD_MULTIPLY_REGISTERS
#undef CPD_MULTIPLY_MEMORY

// Keeps accesses of the sums on this side of what is asynchronous.
template <int kNum>
CPD_DEVICE void Hold(Lanes<Sums> (&sums)[kNum]) {
  CPD_UNROLL
  for (int n = 0; n < kNum; ++n) {
    CPD_UNROLL
    for (float& x : sums[n].value[0].x) asm volatile("" : "+f"(x)::"memory");
  }
}

#endif

// Calls multiply(), whose products go into `sums`. All threads of a block call it.
template <typename F, typename... Arrays>
CPD_DEVICE void Products(F multiply, [[maybe_unused]] Arrays&... sums) {
#ifdef CPD_HAS_WARPGROUPS
  (Hold(sums), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply();
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  (Hold(sums), ...);
#else
  multiply();
#endif
}

}  // namespace cpd::kernels
