// The part of cuBLASLt's C interface that is used here, declared by value: not every toolkit or
// driver has its headers, and the library is opened on first use. Unchanged since CUDA 12.9;
// numbers as in NVIDIA's cublasLt.h and library_types.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpd::lt {

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

}  // namespace cpd::lt
