// Scratch memory of a rank's product on a GPU.
#include "gpu_schedule/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <optional>

namespace cpd {
namespace {

int64_t AlignUp(int64_t bytes) { return (bytes + 255) & ~int64_t{255}; }

}  // namespace

int64_t GemmScratch::Lay(const OverlapProblem& p, char* data, GemmScratch* scratch) {
  const auto begin = reinterpret_cast<intptr_t>(data);
  int64_t at = AlignUp(begin) - begin;
  const auto take = [&](char** part, int64_t bytes) {
    *part = data ? data + at : nullptr;
    at += AlignUp(bytes);
  };
  const bool is_scaled = p.scaling != Scaling::kNone;
  take(&scratch->lt, kLtBytes);
  take(&scratch->rhs, is_scaled && !p.rhs_transposed ? p.k * p.n : 0);
  take(&scratch->lhs, is_scaled && p.lhs_transposed ? p.k * p.m : 0);
  const bool is_apart = ElementBytes(p.output_type) == 2 && p.fuse_gelu &&
                        (p.scaling != Scaling::kNone || p.n % 8 != 0);
  take(&scratch->sums, is_apart ? 4 * p.m * p.n : 0);
  return at + (data ? 0 : 255);  // whatever the alignment of the start
}

// ---- The description of a product for cuBLASLt.

namespace {

std::optional<lt::Type> TypeOf(DataType type) {
  switch (type) {
    case DataType::kE4M3: return lt::kR8FE4M3;
    case DataType::kE5M2: return lt::kR8FE5M2;
    case DataType::kBF16: return lt::kR16BF;
    case DataType::kF16: return lt::kR16F;
    case DataType::kF32: return lt::kR32F;
    default: return std::nullopt;
  }
}

// The table of types in cublasLtMatmul(): operands of one type give this type or float32; 8-bit
// operands may differ, and give any wider type.
bool HasTypes(DataType a, DataType b, DataType c) {
  if (IsByteFloat(a) && IsByteFloat(b)) {
    const bool is_wider = c == DataType::kBF16 || c == DataType::kF16 || c == DataType::kF32;
    return is_wider && !(a == DataType::kE5M2 && b == a);
  }
  return a == b && TypeOf(a) && (c == a || c == DataType::kF32);
}

LtMatrix Lay(const Matrix& matrix, int64_t rows, int64_t columns) {
  // Lines of the matrix are columns for cuBLASLt.
  const auto num_lines = static_cast<uint64_t>(matrix.transposed ? columns : rows);
  const auto length = static_cast<uint64_t>(matrix.transposed ? rows : columns);
  return {TypeOf(matrix.type).value_or(lt::kR32F),
          length,
          num_lines,
          matrix.pitch,
          matrix.data,
          matrix.scales.data};
}

}  // namespace

int AlignmentOf(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<int>(bits & -bits);
}

bool LtHasEpilogue(const GemmTask& task) {
  const Epilogue& e = task.epilogue;
  if (e.is_empty()) return true;
  if (IsByteFloat(task.a.type)) return !e.gelu && task.c_type != DataType::kF32;
  if (task.c_type != task.a.type) return false;
  if (!e.gelu) return true;
  // Its tanh may be an approximation with fewer bits than float32.
  if (task.c_type == DataType::kF32) return false;
  const char* aux = e.gelu_input ? e.gelu_input : e.pre_gelu;
  if (e.gelu_input && e.bias) return false;
  return aux == nullptr || (task.c_pitch % 8 == 0 && AlignmentOf(aux) >= 16);
}

std::vector<int64_t> LtProduct::Key() const {
  std::vector<int64_t> key{compute_type,      transposes_a,     transposes_b,     has_block_scales,
                           accumulates_fast,  epilogue,         aux_pitch,        num_sms,
                           AlignmentOf(bias), AlignmentOf(aux), ignores_alignment};
  for (const LtMatrix* x : {&a, &b, &d}) {
    for (const int64_t number :
         {static_cast<int64_t>(x->type), static_cast<int64_t>(x->rows),
          static_cast<int64_t>(x->columns), x->pitch, static_cast<int64_t>(AlignmentOf(x->data))}) {
      key.push_back(number);
    }
  }
  return key;
}

Status DescribeLtProduct(const std::string& op, const GemmTask& task, const LtOptions& options,
                         LtProduct* product) {
  const auto refuse = [&](const std::string& what) {
    return Status::Invalid(op, ": on GPUs ", what, ". Pass implementation='xla'.");
  };
  if (!task.more.empty()) return refuse("a product cannot read the operands of several ranks");
  const bool is_narrow = IsByteFloat(task.a.type);
  const DataType c_type = LtHasEpilogue(task) ? task.c_type : DataType::kF32;
  if (!HasTypes(task.a.type, task.b.type, c_type)) {
    return refuse("cuBLASLt does not support these types of operands and result");
  }
  LtProduct& p = *product;
  p = {};
  p.a = Lay(task.b, task.k, task.n);
  p.b = Lay(task.a, task.m, task.k);
  p.transposes_a = task.b.transposed;
  p.transposes_b = task.a.transposed;
  p.d = {TypeOf(c_type).value_or(lt::kR32F),
         static_cast<uint64_t>(task.n),
         static_cast<uint64_t>(task.m),
         task.c_pitch,
         task.c,
         nullptr};
  p.num_sms = options.num_sms;
  if (options.tf32 && task.a.type == DataType::kF32) p.compute_type = lt::kCompute32FFastTF32;
  if (is_narrow) {
    p.has_block_scales = task.a.scales.is_blocks;
    p.accumulates_fast = !options.use_split_accumulator;
    if (!p.transposes_a || p.transposes_b) {
      return refuse("8-bit operands need the contracted dimension to be the last of each");
    }
    if (task.k % 16 != 0 || task.n % 16 != 0 || AlignmentOf(task.a.data) < 16 ||
        AlignmentOf(task.b.data) < 16 || AlignmentOf(task.c) < 16) {
      return refuse("8-bit operands need contracted sizes and columns in multiples of 16, here " +
                    std::to_string(task.k) + " and " + std::to_string(task.n));
    }
  }
  if (task.epilogue.is_empty() || !LtHasEpilogue(task)) return Status::Ok();
  const Epilogue& e = task.epilogue;
  p.epilogue = e.bias ? uint32_t{lt::kBias} : 0;
  p.bias = e.bias;
  if (!e.gelu) return Status::Ok();
  p.aux = e.gelu_input ? e.gelu_input : e.pre_gelu;
  p.aux_pitch = p.aux ? task.c_pitch : 0;
  p.epilogue |= e.gelu_input ? lt::kDGelu : lt::kGelu;
  if (p.aux) p.epilogue |= lt::kAux;
  return Status::Ok();
}

// ---- cuBLASLt, opened on first use, and a cache of its algorithms.

namespace {

// CUDA 13's first; JAX's plugin has opened one of them.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

Status Failed(const std::string& op, const char* what, int result) {
  return Status::Internal(op, ": cuBLASLt's ", what, " failed with status ", result,
                          ". Pass implementation='xla'.");
}

int ElementBytesOf(lt::Type type) {
  return type == lt::kR32F ? 4 : type == lt::kR16BF || type == lt::kR16F ? 2 : 1;
}

}  // namespace

// The library's descriptors of one product.
class CublasLt::Descriptors {
 public:
  explicit Descriptors(const lt::Functions& functions) : functions_(functions) {}
  ~Descriptors() {
    if (desc) functions_.MatmulDescDestroy(desc);
    for (const lt::MatrixLayout layout : {a, b, d}) {
      if (layout) functions_.MatrixLayoutDestroy(layout);
    }
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  Status Describe(const std::string& op, const LtProduct& p) {
    int result = functions_.MatmulDescCreate(&desc, p.compute_type, lt::kR32F);
    const auto set = [&](lt::DescAttribute attribute, const auto& value) {
      if (result == lt::kSuccess) {
        result = functions_.MatmulDescSetAttribute(desc, attribute, &value, sizeof value);
      }
    };
    set(lt::kTransA, int32_t{p.transposes_a ? lt::kT : lt::kN});
    set(lt::kTransB, int32_t{p.transposes_b ? lt::kT : lt::kN});
    set(lt::kEpilogue, p.epilogue);
    if (p.bias) set(lt::kBiasPointer, p.bias);
    if (p.aux) {
      set(lt::kEpilogueAuxPointer, p.aux);
      set(lt::kEpilogueAuxLd, p.aux_pitch);
    }
    if (p.num_sms > 0) set(lt::kSmCountTarget, p.num_sms);
    if (p.a.scales) {
      set(lt::kAScalePointer, p.a.scales);
      set(lt::kBScalePointer, p.b.scales);
      set(lt::kFastAccum, int8_t{p.accumulates_fast});
    }
    if (p.has_block_scales) {
      set(lt::kAScaleMode, int32_t{lt::kVec32UE8M0});
      set(lt::kBScaleMode, int32_t{lt::kVec32UE8M0});
    }
    const auto lay = [&](const LtMatrix& x, lt::MatrixLayout* layout) {
      if (result == lt::kSuccess) {
        result = functions_.MatrixLayoutCreate(layout, x.type, x.rows, x.columns, x.pitch);
      }
    };
    lay(p.a, &a);
    lay(p.b, &b);
    lay(p.d, &d);
    return result == lt::kSuccess ? Status::Ok() : Failed(op, "description of a product", result);
  }

  lt::MatmulDesc desc = nullptr;
  lt::MatrixLayout a = nullptr, b = nullptr, d = nullptr;

 private:
  const lt::Functions& functions_;
};

CublasLt& CublasLt::Get() {
  static auto* library = new CublasLt;
  return *library;
}

Status CublasLt::Open(const std::string& op, const char* path) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_open_) return Status::Ok();
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  for (const char* name : kNames) {
    if (library == nullptr && path == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    const char* why = dlerror();
    return Status::Invalid(op, ": cuBLASLt cannot be opened (", (why ? why : "no reason"),
                           "). Install nvidia-cublas, which comes with jax[cuda13], or pass "
                           "implementation='xla'.");
  }
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto* function) {
    void* found = dlsym(library, name);
    if (found == nullptr) missing = name;
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(found);
  };
  find("cublasLtCreate", &functions_.Create);
  find("cublasLtMatmulDescCreate", &functions_.MatmulDescCreate);
  find("cublasLtMatmulDescDestroy", &functions_.MatmulDescDestroy);
  find("cublasLtMatmulDescSetAttribute", &functions_.MatmulDescSetAttribute);
  find("cublasLtMatrixLayoutCreate", &functions_.MatrixLayoutCreate);
  find("cublasLtMatrixLayoutDestroy", &functions_.MatrixLayoutDestroy);
  find("cublasLtMatmulPreferenceCreate", &functions_.MatmulPreferenceCreate);
  find("cublasLtMatmulPreferenceDestroy", &functions_.MatmulPreferenceDestroy);
  find("cublasLtMatmulPreferenceSetAttribute", &functions_.MatmulPreferenceSetAttribute);
  find("cublasLtMatmulAlgoGetHeuristic", &functions_.MatmulAlgoGetHeuristic);
  find("cublasLtMatmul", &functions_.Matmul);
  if (missing) {
    return Status::Invalid(op, ": the installed cuBLASLt has no ", missing,
                           ". Install nvidia-cublas 12.9 or newer, or pass implementation='xla'.");
  }
  is_open_ = true;
  return Status::Ok();
}

Status CublasLt::Prepare(const std::string& op, int device) {
  if (Status status = Open(op); !status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  lt::Handle handle = nullptr;
  return HandleOf(op, device, &handle);
}

Status CublasLt::HandleOf(const std::string& op, int device, lt::Handle* handle) {
  lt::Handle& made = handles_[device];
  if (made == nullptr) {
    if (const int result = functions_.Create(&made); result != lt::kSuccess) {
      return Failed(op, "cublasLtCreate", result);
    }
  }
  *handle = made;
  return Status::Ok();
}

CublasLt::Chosen CublasLt::Choose(lt::Handle handle, const LtProduct& p,
                                  const Descriptors& descriptors, const LtResources& resources) {
  lt::Preference preference = nullptr;
  int result = functions_.MatmulPreferenceCreate(&preference);
  const auto set = [&](lt::PreferenceAttribute attribute, const auto& value) {
    if (result == lt::kSuccess) {
      result = functions_.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
    }
  };
  set(lt::kMaxWorkspaceBytes, static_cast<uint64_t>(resources.workspace_bytes));
  const auto set_alignment = [&](lt::PreferenceAttribute attribute, const LtMatrix& x) {
    const int known = p.ignores_alignment ? ElementBytesOf(x.type) : AlignmentOf(x.data);
    set(attribute, static_cast<uint32_t>(known));
  };
  set_alignment(lt::kMinAlignmentA, p.a);
  set_alignment(lt::kMinAlignmentB, p.b);
  set_alignment(lt::kMinAlignmentC, p.d);
  set_alignment(lt::kMinAlignmentD, p.d);
  lt::Heuristic found{};
  int count = 0;
  if (result == lt::kSuccess) {
    result = functions_.MatmulAlgoGetHeuristic(handle, descriptors.desc, descriptors.a,
                                               descriptors.b, descriptors.d, descriptors.d,
                                               preference, 1, &found, &count);
  }
  if (preference) functions_.MatmulPreferenceDestroy(preference);
  if (result != lt::kSuccess || count == 0 || found.state != lt::kSuccess) {
    const int status = result != lt::kSuccess ? result : found.state;
    return {{},
            0,
            "cuBLASLt has no algorithm (status " + std::to_string(status) + ") for [" +
                std::to_string(p.d.columns) + ", " +
                std::to_string(p.transposes_b ? p.b.columns : p.b.rows) + "] times [.., " +
                std::to_string(p.d.rows) + "] with epilogue " + std::to_string(p.epilogue) +
                " on this GPU"};
  }
  return {found.algorithm, static_cast<int64_t>(found.workspace_bytes), ""};
}

Status CublasLt::Multiply(const std::string& op, const LtProduct& p, const LtResources& resources,
                          bool* is_missing) {
  if (is_missing) *is_missing = false;
  if (Status status = Open(op); !status.ok()) return status;
  Descriptors descriptors(functions_);
  Status status = descriptors.Describe(op, p);
  if (!status.ok()) return status;
  std::vector<int64_t> key = p.Key();
  key.push_back(resources.device);
  key.push_back(resources.workspace_bytes);
  lt::Handle handle = nullptr;
  Chosen chosen;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    status = HandleOf(op, resources.device, &handle);
    if (!status.ok()) return status;
    if (const auto known = chosen_.find(key); known != chosen_.end()) {
      chosen = known->second;
    } else {
      chosen = chosen_[key] = Choose(handle, p, descriptors, resources);
    }
  }
  if (!chosen.missing.empty()) {
    if (is_missing) *is_missing = true;
    return Status::Internal(op, ": ", chosen.missing, ". Pass implementation='xla'.");
  }
  const float alpha = 1, beta = 0;
  const int result = functions_.Matmul(
      handle, descriptors.desc, &alpha, p.a.data, descriptors.a, p.b.data, descriptors.b, &beta,
      p.d.data, descriptors.d, const_cast<char*>(p.d.data), descriptors.d, &chosen.algorithm,
      resources.workspace, static_cast<size_t>(chosen.workspace_bytes), resources.stream);
  return result == lt::kSuccess ? Status::Ok() : Failed(op, "cublasLtMatmul", result);
}

int64_t CublasLt::num_chosen() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(chosen_.size());
}

// ---- A product with its epilogue on a GPU: by cuBLASLt as a whole, or in parts that it has.

namespace {

// The task without its epilogue, as float32 sums.
GemmTask SumsOf(const GemmTask& task, char* sums, int64_t pitch) {
  GemmTask product = task;
  product.c = sums;
  product.c_type = DataType::kF32;
  product.c_pitch = pitch;
  product.epilogue = {};
  return product;
}

Status Multiply(const std::string& op, const GemmTask& task, const LtOptions& options,
                const LtResources& resources, bool ignores_alignment, bool* is_missing) {
  LtProduct product;
  *is_missing = false;
  if (Status status = DescribeLtProduct(op, task, options, &product); !status.ok()) return status;
  product.ignores_alignment = ignores_alignment;
  return CublasLt::Get().Multiply(op, product, resources, is_missing);
}

// Blocks of rows, whose sums take the place of the library's workspace. nullopt if the library has
// no kernel for them.
std::optional<Status> MultiplyRows(const std::string& op, const GemmTask& task,
                                   const LtOptions& options, const LtResources& resources,
                                   bool ignores_alignment, const LtEpilogue& epilogue) {
  int64_t most = std::min(task.m, resources.workspace_bytes / (4 * task.n));
  if (task.a.scales.is_blocks && most < task.m) most = 0;  // tiles of scales are not cut
  LtResources without = resources;
  without.workspace_bytes = 0;
  for (int64_t row = 0; row < task.m && most > 0; row += most) {
    GemmTask rows = task.FromRow(row);
    rows.m = std::min(most, task.m - row);
    const GemmTask product = SumsOf(rows, resources.workspace, task.n);
    // The first block decides: blocks may differ in their number of rows and their alignment.
    bool is_missing = false;
    const Status status = Multiply(op, product, options, without, ignores_alignment, &is_missing);
    if (is_missing) return std::nullopt;
    if (!status.ok()) return status;
    epilogue(rows, product.c, product.c_pitch);
  }
  if (most == 0) return std::nullopt;
  return Status::Ok();
}

}  // namespace

Status MultiplyWithLt(const std::string& op, const GemmTask& task, const LtOptions& options,
                      const LtResources& resources, char* sums, const LtEpilogue& epilogue) {
  bool is_missing = false;
  const bool is_whole = LtHasEpilogue(task);
  GemmTask product = task;
  if (!is_whole) {
    const bool in_place = task.c_type == DataType::kF32;
    product = SumsOf(task, in_place ? task.c : sums, in_place ? task.c_pitch : task.n);
  }
  const Status first = Multiply(op, product, options, resources, false, &is_missing);
  if (first.ok() && !is_whole) epilogue(task, product.c, product.c_pitch);
  if (!is_missing) return first;
  for (const bool ignores_alignment : {false, true}) {
    const auto status = MultiplyRows(op, task, options, resources, ignores_alignment, epilogue);
    if (status) return *status;
  }
  return first;
}

}  // namespace cpd
