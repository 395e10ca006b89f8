// Scratch memory of a rank's product on a GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "gpu_schedule/cublaslt_api.h"
#include "transport/transport.h"

namespace cpd {

// In this order: cuBLASLt's workspace, transposed 8-bit operands, and sums for an epilogue in a
// kernel.
struct GemmScratch {
  static constexpr int64_t kLtBytes = 32 << 20;

  char* lt = nullptr;  // aligned to 256 bytes
  char* rhs = nullptr;
  char* lhs = nullptr;
  char* sums = nullptr;

  // Lays out the scratch of a whole product, at any address; `data` may be nullptr. Returns its
  // size in bytes. Python asks XLA for the same number.
  static int64_t Lay(const OverlapProblem& problem, char* data, GemmScratch* scratch);
};

// ---- The description of a product for cuBLASLt, which is column-major: our c = a b is c' = b' a'
// there, with our b as its A.

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

// ---- cuBLASLt, opened on first use, and a cache of its algorithms.

// The resources of a device that a product uses.
struct LtResources {
  int device = 0;
  char* workspace = nullptr;  // aligned to 256 bytes; for one product at a time
  int64_t workspace_bytes = 0;
  lt::Stream stream = nullptr;
};

// All functions are thread-safe.
class CublasLt {
 public:
  static CublasLt& Get();  // never destroyed: CUDA may have been unloaded by then

  // Opens the library: by name, as JAX does, or from `path` in tests.
  Status Open(const std::string& op, const char* path = nullptr);

  // Opens the library and creates the handle of the current device. Both allocate, so call this
  // before any recording.
  Status Prepare(const std::string& op, int device);

  // Enqueues the product on the stream, with the algorithm that was first chosen for its shape, on
  // the current device. If the library has none, fails and enqueues nothing; if given, `is_missing`
  // tells whether that is why.
  Status Multiply(const std::string& op, const LtProduct& product, const LtResources& resources,
                  bool* is_missing = nullptr);

  int64_t num_chosen();  // cached algorithms

 private:
  struct Chosen {
    lt::Algorithm algorithm;
    int64_t workspace_bytes;
    std::string missing;  // why there is none; else empty
  };
  class Descriptors;

  Status HandleOf(const std::string& op, int device, lt::Handle* handle);
  Chosen Choose(lt::Handle handle, const LtProduct& product, const Descriptors& descriptors,
                const LtResources& resources);

  std::mutex mutex_;
  bool is_open_ = false;
  lt::Functions functions_ = {};
  std::map<int, lt::Handle> handles_;  // by device
  std::map<std::vector<int64_t>, Chosen> chosen_;
};

// ---- A product with its epilogue on a GPU: by cuBLASLt as a whole, or in parts that it has.

// Applies the epilogue of a task to float32 sums [m, n] with a pitch in elements, and stores the
// result. The sums may be the result's own memory.
using LtEpilogue = std::function<void(const GemmTask& task, const char* sums, int64_t pitch)>;

// Enqueues the task. `sums` is memory for [m, n] float32, for tasks whose epilogue the library
// lacks; see GemmScratch.
//
// If the library has no algorithm for the task, it is multiplied without the epilogue, as blocks of
// rows in the workspace; then also with an algorithm that needs no alignment.
Status MultiplyWithLt(const std::string& op, const GemmTask& task, const LtOptions& options,
                      const LtResources& resources, char* sums, const LtEpilogue& epilogue);

}  // namespace cpd
