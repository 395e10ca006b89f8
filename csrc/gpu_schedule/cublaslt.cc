// cuBLASLt, opened on first use, and a cache of its algorithms.
#include "gpu_schedule/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>

namespace cpd {
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

}  // namespace cpd
