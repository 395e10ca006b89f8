// The description of a product for cuBLASLt, which is column-major: our c = a b is c' = b' a'
// there, with our b as its A.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "gpu_schedule/cublaslt_api.h"
#include "transport/transport.h"

namespace cpd {

struct LtMatrix {
  lt::Type type = lt::kR32F;
  uint64_t rows = 0, columns = 0;
  int64_t pitch = 0;
  const char* data = nullptr;
  const char* scales = nullptr;  // of 8-bit operands
};

struct LtProduct {
  lt::ComputeType compute_type = lt::kCompute32F;
  bool transposes_a = false, transposes_b = false;
  LtMatrix a, b, d;
  bool has_block_scales = false;
  bool accumulates_fast = false;
  uint32_t epilogue = lt::kDefault;
  const char* bias = nullptr;
  const char* aux = nullptr;
  int64_t aux_pitch = 0;
  int32_t num_sms = 0;  // 0: all of them
  // Asks for an algorithm that needs no alignment of addresses beyond that of elements.
  bool ignores_alignment = false;

  // The key of the algorithm cache: everything but the addresses of operands, which only count by
  // their alignment.
  std::vector<int64_t> Key() const;
};

struct LtOptions {
  bool tf32 = false;                   // float32 operands are rounded to 10 fraction bits
  bool use_split_accumulator = false;  // of 8-bit products
  int32_t num_sms = 0;
};

// Whether the library computes the epilogue of a task with the product; else a kernel does so
// afterwards.
bool LtHasEpilogue(const GemmTask& task);

// Fails if the library cannot multiply the operands. Describes a task without its epilogue if the
// library does not have it. Block scales must be in the order of tensor cores.
Status DescribeLtProduct(const std::string& op, const GemmTask& task, const LtOptions& options,
                         LtProduct* product);

// The largest power of two, up to 256, that divides an address.
int AlignmentOf(const void* address);

}  // namespace cpd
