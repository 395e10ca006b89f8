// The descriptions of products for cuBLASLt, against plain sums in float64: each type, layout,
// epilogue and scaling mode, with a library of plain loops that is opened and called like the real
// one.
#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <utility>

#include "gpu_schedule/cublaslt.h"
#include "lt_case.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_cublaslt {

void WideOperands() {
  for (const DataType type : {DataType::kF32, DataType::kBF16, DataType::kF16}) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        for (const Kind kind : {Kind::kPlain, Kind::kBias, Kind::kGelu, Kind::kGeluAlone,
                                Kind::kBiasGelu, Kind::kGeluGradient}) {
          const bool has_gelu = kind != Kind::kPlain && kind != Kind::kBias;
          if (has_gelu && type == DataType::kF32) continue;  // by this package's own kernel
          Case c{type, type, type};
          c.a_transposed = a_transposed;
          c.b_transposed = b_transposed;
          c.kind = kind;
          IsRight(c);
          c.first_row = 3;  // less aligned addresses
          c.kind = kind == Kind::kGelu || kind == Kind::kBiasGelu ? Kind::kGeluAlone : kind;
          if (kind == Kind::kGeluGradient) continue;
          IsRight(c);
        }
        Case partial{type, type, DataType::kF32};  // sums of other ranks
        partial.n = 7;
        partial.k = 3;
        partial.a_transposed = a_transposed;
        partial.b_transposed = b_transposed;
        IsRight(partial);
      }
    }
  }
}

void ScaledOperands() {
  for (const auto& [a, b] :
       {std::pair{DataType::kE4M3, DataType::kE4M3}, std::pair{DataType::kE5M2, DataType::kE4M3},
        std::pair{DataType::kE4M3, DataType::kE5M2}}) {
    for (const DataType out : {DataType::kF32, DataType::kBF16, DataType::kF16}) {
      for (const Scaling scaling : {Scaling::kTensor, Scaling::kBlocks}) {
        Case c{a, b, out};
        c.b_transposed = true;
        c.scaling = scaling;
        c.k = 160;  // more blocks of scales than a tile has
        IsRight(c);
        c.kind = Kind::kBias;
        if (out != DataType::kF32) IsRight(c);
      }
    }
  }
}

GemmTask Task(DataType type, DataType out, int64_t m, int64_t n, int64_t k) {
  alignas(256) static char memory[4096];
  GemmTask task;
  task.m = m;
  task.n = n;
  task.k = k;
  task.a = {memory, type, k};
  task.b = {memory, type, n};
  task.c = memory;
  task.c_type = out;
  task.c_pitch = n;
  return task;
}

Status Describe(const GemmTask& task, LtProduct* product, LtOptions options = {}) {
  return DescribeLtProduct("gemm", task, options, product);
}

// What the library cannot multiply is rejected; what this package's kernels do is left to them.
void WhatTheLibraryCannotDo() {
  LtProduct product;
  GemmTask task = Task(DataType::kF32, DataType::kBF16, 4, 8, 8);
  CHECK(Contains(Describe(task, &product), "does not support these types of operands"));
  task = Task(DataType::kE4M3, DataType::kBF16, 4, 16, 16);
  CHECK(Contains(Describe(task, &product), "contracted dimension to be the last"));
  task.b.transposed = true;
  CHECK(Describe(task, &product).ok());
  task.k = 24;
  CHECK(Contains(Describe(task, &product), "multiples of 16, here 24 and 16"));
  task = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  task.more.push_back({8, task.a, task.b});
  CHECK(Contains(Describe(task, &product), "operands of several ranks"));

  task = Task(DataType::kBF16, DataType::kBF16, 4, 12, 8);
  task.epilogue.gelu = true;
  task.epilogue.pre_gelu = task.c;
  CHECK(!LtHasEpilogue(task));  // lines of 12
  CHECK(Describe(task, &product).ok());
  CHECK(product.epilogue == lt::kDefault && product.d.type == lt::kR32F);
  task.epilogue.pre_gelu = nullptr;
  CHECK(LtHasEpilogue(task));
  task = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  task.epilogue.bias = task.c;
  CHECK(LtHasEpilogue(task));
  task.epilogue.gelu = true;
  CHECK(!LtHasEpilogue(task));  // its tanh may be an approximation
  CHECK(Describe(task, &product).ok());
  CHECK(product.epilogue == lt::kDefault && product.bias == nullptr);
  task.epilogue = {};
  task.epilogue.gelu = true;
  task.epilogue.gelu_input = task.c;
  CHECK(!LtHasEpilogue(task));
  task = Task(DataType::kBF16, DataType::kF32, 4, 8, 8);
  task.epilogue.bias = task.c;
  CHECK(!LtHasEpilogue(task));
  task = Task(DataType::kE4M3, DataType::kBF16, 4, 16, 16);
  task.epilogue.gelu = true;
  CHECK(!LtHasEpilogue(task));
}

void WhatIsAskedFor() {
  LtProduct product;
  const GemmTask wide = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  CHECK(Describe(wide, &product).ok() && product.compute_type == lt::kCompute32F);
  CHECK(Describe(wide, &product, {true, true, 116}).ok());
  CHECK(product.compute_type == lt::kCompute32FFastTF32 && product.num_sms == 116);
  GemmTask narrow = Task(DataType::kE4M3, DataType::kF32, 4, 16, 16);
  narrow.b.transposed = true;
  CHECK(Describe(narrow, &product).ok() && product.accumulates_fast);
  CHECK(Describe(narrow, &product, {false, true, 0}).ok() && !product.accumulates_fast);
  const GemmTask half = Task(DataType::kBF16, DataType::kBF16, 4, 8, 8);
  CHECK(Describe(half, &product, {true, true, 0}).ok() && product.compute_type == lt::kCompute32F);
}

// Where the library finds nothing, fewer wishes remain: no call fails for lack of an algorithm.
void WithoutAnAlgorithm(void* library) {
  auto* refuses_epilogues = static_cast<bool*>(dlsym(library, "fake_refuses_epilogues"));
  auto* refuses_alignments = static_cast<bool*>(dlsym(library, "fake_refuses_alignments"));
  auto* refuses_all = static_cast<bool*>(dlsym(library, "fake_refuses_all"));
  CHECK(refuses_epilogues && refuses_alignments && refuses_all);
  Case c{DataType::kBF16, DataType::kBF16, DataType::kBF16};
  c.m = 13;
  c.n = 44;
  c.kind = Kind::kBias;
  *refuses_epilogues = true;
  IsRight(c);
  CHECK(num_epilogues == 3);  // 5 rows of 44 sums at a time
  for (const bool transposed : {false, true}) {
    Case gelu = c;
    gelu.n = 48;
    gelu.a_transposed = transposed;
    gelu.kind = Kind::kBiasGelu;
    IsRight(gelu);
    CHECK(num_epilogues == 3);
  }
  *refuses_alignments = true;
  c.k = 24;  // other shapes: algorithms, and that there are none, are remembered
  IsRight(c);
  CHECK(num_epilogues == 3);
  Case six{DataType::kBF16, DataType::kBF16, DataType::kBF16};
  six.n = 6;
  IsRight(six);
  CHECK(num_epilogues == 1);
  for (const Scaling scaling : {Scaling::kTensor, Scaling::kBlocks}) {
    Case narrow{DataType::kE4M3, DataType::kE4M3, DataType::kBF16};
    narrow.n = 32;
    narrow.b_transposed = true;
    narrow.scaling = scaling;
    narrow.kind = Kind::kBias;
    IsRight(narrow);
    CHECK(num_epilogues == 1);
  }
  *refuses_epilogues = *refuses_alignments = false;
  const int64_t known = CublasLt::Get().num_chosen();
  IsRight(six);  // remembered, not asked for again
  CHECK(num_epilogues == 1 && CublasLt::Get().num_chosen() == known);
  *refuses_all = true;
  GemmTask task = Task(DataType::kBF16, DataType::kBF16, 3, 10, 8);
  CHECK(Contains(MultiplyWithLt("gemm", task, {}, Resources(), nullptr, ApplyEpilogue),
                 "gemm: cuBLASLt has no algorithm (status 15) for [3, 8] times [.., 10] with"));
  *refuses_all = false;
}

void AnAlgorithmIsChosenOnceForAShape() {
  LtProduct product;
  const auto multiply = [&](GemmTask task) {
    task.c = workspace;  // anywhere
    CHECK(Describe(task, &product).ok());
    LtResources resources = Resources();
    resources.workspace_bytes = 0;
    CHECK(CublasLt::Get().Multiply("gemm", product, resources).ok());
    return CublasLt::Get().num_chosen();
  };
  const int64_t first = multiply(Task(DataType::kF32, DataType::kF32, 4, 8, 8));
  CHECK(multiply(Task(DataType::kF32, DataType::kF32, 4, 8, 8)) == first);
  CHECK(multiply(Task(DataType::kF32, DataType::kF32, 3, 8, 8)) == first + 1);
  GemmTask moved = Task(DataType::kF32, DataType::kF32, 4, 8, 8);
  moved.a.data += 4;  // its address is less aligned
  CHECK(multiply(moved) == first + 2);
}

const Register kTests("test_cublaslt", [](const Numbers&) {
  CHECK(Contains(CublasLt::Get().Open("gemm", "/nowhere.so"),
                 "gemm: cuBLASLt cannot be opened (/nowhere.so"));
  CHECK(Contains(CublasLt::Get().Open("gemm", "libm.so.6"), "has no cublasLtMatmul"));
  const std::string fake =
      std::filesystem::read_symlink("/proc/self/exe").replace_filename("libfake_cublaslt.so");
  CHECK(CublasLt::Get().Open("gemm", fake.c_str()).ok());
  CHECK(CublasLt::Get().Prepare("gemm", 0).ok());
  WideOperands();
  ScaledOperands();
  WhatTheLibraryCannotDo();
  WhatIsAskedFor();
  AnAlgorithmIsChosenOnceForAShape();
  WithoutAnAlgorithm(dlopen(fake.c_str(), RTLD_NOW | RTLD_NOLOAD));
});

}  // namespace cpd::test_cublaslt
