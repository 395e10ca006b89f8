// A product on a GPU by cuBLASLt: its scratch memory, its description, the library, its epilogue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/overlap_problem.h"
#include "transport/transport.h"

namespace cpd {

// ---- The part of cuBLASLt's C interface that is used here, declared by value: not every toolkit
// or driver has its headers, and the library is opened on first use. Unchanged since CUDA 12.9;
// numbers as in NVIDIA's cublasLt.h and library_types.h.

namespace lt {

using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;
using Stream = void*;  // cudaStream_t

enum Result : int { kSuccess = 0, kNotSupported = 15 };

// cudaDataType_t
enum Type : int { kR32F = 0, kR16F = 2, kR16BF = 14, kR8FE4M3 = 28, kR8FE5M2 = 29 };

// cublasComputeType_t
enum ComputeType : int { kCompute32F = 68, kCompute32FFastTF32 = 77 };

enum Operation : int32_t { kN = 0, kT = 1 };

// cublasLtEpilogue_t
enum Epilogue : uint32_t { kDefault = 1, kBias = 4, kGelu = 32, kDGelu = 64, kAux = 128 };

// cublasLtMatmulMatrixScale_t
enum ScaleMode : int32_t { kScalar32F = 0, kVec32UE8M0 = 2 };

// cublasLtMatmulDescAttributes_t
enum DescAttribute : int {
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kEpilogueAuxPointer = 11,
  kEpilogueAuxLd = 12,
  kSmCountTarget = 15,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kFastAccum = 25,
  kAScaleMode = 31,
  kBScaleMode = 32,
};

// cublasLtMatmulPreferenceAttributes_t
enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

// The functions, by name without `cublasLt`.
struct Functions {
  int (*Create)(Handle*);
  int (*MatmulDescCreate)(MatmulDesc*, int compute_type, int scale_type);
  int (*MatmulDescDestroy)(MatmulDesc);
  int (*MatmulDescSetAttribute)(MatmulDesc, int attribute, const void*, size_t bytes);
  int (*MatrixLayoutCreate)(MatrixLayout*, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*MatrixLayoutDestroy)(MatrixLayout);
  int (*MatmulPreferenceCreate)(Preference*);
  int (*MatmulPreferenceDestroy)(Preference);
  int (*MatmulPreferenceSetAttribute)(Preference, int attribute, const void*, size_t bytes);
  int (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c,
                                MatrixLayout d, Preference, int requested, Heuristic*, int* found);
  int (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b,
                MatrixLayout, const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout,
                const Algorithm*, void* workspace, size_t workspace_bytes, Stream);
};

}  // namespace lt

// ---- Scratch memory of a rank's product on a GPU.

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

// ---- The description of a product for cuBLASLt, which is column-major: our c = a b is there
// c' = b' a', with our b as its A.

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

  // Opens the library and creates the handle of the current device. Both allocate: call this first.
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
