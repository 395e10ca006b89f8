// A cuBLASLt made of plain loops on the host. It rejects what the real library documents as
// unsupported: 8-bit operands that are not contiguous along the contracted dimension, sizes and
// addresses that tensor cores cannot read, epilogues that it lacks. Built as a separate library.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "gpu_schedule/cublaslt.h"
#include "numerics/element.h"

namespace {

using namespace cpd;  // NOLINT

struct Desc {
  int compute_type, scale_type;
  std::map<int, std::string> attributes;

  template <typename T>
  T Get(int attribute, T otherwise = {}) const {
    const auto found = attributes.find(attribute);
    if (found == attributes.end()) return otherwise;
    if (found->second.size() != sizeof(T)) std::abort();  // of an undocumented type
    T value;
    std::memcpy(&value, found->second.data(), sizeof value);
    return value;
  }
};

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t ld;
};

int64_t Bytes(int type) {
  return type == lt::kR32F ? 4 : type == lt::kR16BF || type == lt::kR16F ? 2 : 1;
}

float Load(const void* data, int type, int64_t i) {
  switch (type) {
    case lt::kR32F: return static_cast<const float*>(data)[i];
    case lt::kR16BF: return static_cast<const BF16*>(data)[i];
    case lt::kR16F: return static_cast<const F16*>(data)[i];
    case lt::kR8FE4M3: return static_cast<const E4M3*>(data)[i];
    default: return static_cast<const E5M2*>(data)[i];
  }
}

void Store(void* data, int type, int64_t i, float value) {
  if (type == lt::kR32F) static_cast<float*>(data)[i] = value;
  if (type == lt::kR16BF) static_cast<BF16*>(data)[i] = BF16::Round(value);
  if (type == lt::kR16F) static_cast<F16*>(data)[i] = F16::Round(value);
}

// In the order of tensor cores: tiles of 128 lines and 4 blocks.
float BlockScale(const void* scales, int64_t line, int64_t block, int64_t num_blocks) {
  const int64_t tiles = (num_blocks + 3) / 4;
  const int64_t tile = line / 128 * tiles + block / 4, in = line % 128;
  const auto byte =
      static_cast<const uint8_t*>(scales)[tile * 512 + in % 32 * 16 + in / 32 * 4 + block % 4];
  return std::ldexp(1.0f, byte - 127);
}

double Gelu(double z) {
  return 0.5 * z * (1 + std::tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)));
}

double GeluDerivative(double z) {
  const double t = std::tanh(0.7978845608028654 * (z + 0.044715 * z * z * z));
  return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * z * z);
}

bool Is8Bit(const Layout& x) { return Bytes(x.type) == 1; }

bool IsSupported(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  const auto epilogue = desc.Get<uint32_t>(lt::kEpilogue, lt::kDefault);
  if (epilogue & ~(lt::kDefault | lt::kBias | lt::kGelu | lt::kDGelu | lt::kAux)) return false;
  if ((epilogue & lt::kAux) && desc.Get<int64_t>(lt::kEpilogueAuxLd) % 8 != 0) return false;
  if (!Is8Bit(a)) return a.type == b.type && (d.type == a.type || d.type == lt::kR32F);
  if (!Is8Bit(b) || (a.type == lt::kR8FE5M2 && b.type == a.type)) return false;
  if (desc.Get<int32_t>(lt::kTransA) != lt::kT || desc.Get<int32_t>(lt::kTransB) != lt::kN) {
    return false;
  }
  if (epilogue != lt::kDefault && (epilogue != lt::kBias || d.type == lt::kR32F)) return false;
  return a.rows % 16 == 0 && a.columns % 16 == 0 && a.ld % 16 == 0 && b.ld % 16 == 0;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// What the heuristic refuses beyond the documented limits: a test may find nothing on purpose.
API bool fake_refuses_epilogues, fake_refuses_alignments, fake_refuses_all;
bool fake_refuses_epilogues = false, fake_refuses_alignments = false, fake_refuses_all = false;

API int cublasLtCreate(lt::Handle* handle) {
  *handle = new int;
  return lt::kSuccess;
}

API int cublasLtMatmulDescCreate(lt::MatmulDesc* desc, int compute_type, int scale_type) {
  *desc = new Desc{compute_type, scale_type, {}};
  return lt::kSuccess;
}

API int cublasLtMatmulDescDestroy(lt::MatmulDesc desc) {
  delete static_cast<Desc*>(desc);
  return lt::kSuccess;
}

API int cublasLtMatmulDescSetAttribute(lt::MatmulDesc desc, int attribute, const void* data,
                                       size_t bytes) {
  static_cast<Desc*>(desc)->attributes[attribute].assign(static_cast<const char*>(data), bytes);
  return lt::kSuccess;
}

API int cublasLtMatrixLayoutCreate(lt::MatrixLayout* layout, int type, uint64_t rows,
                                   uint64_t columns, int64_t ld) {
  if (ld < static_cast<int64_t>(rows)) return 7;  // an invalid value
  *layout = new Layout{type, rows, columns, ld};
  return lt::kSuccess;
}

API int cublasLtMatrixLayoutDestroy(lt::MatrixLayout layout) {
  delete static_cast<Layout*>(layout);
  return lt::kSuccess;
}

API int cublasLtMatmulPreferenceCreate(lt::Preference* preference) {
  *preference = new Desc{};
  return lt::kSuccess;
}

API int cublasLtMatmulPreferenceDestroy(lt::Preference preference) {
  delete static_cast<Desc*>(preference);
  return lt::kSuccess;
}

API int cublasLtMatmulPreferenceSetAttribute(lt::Preference preference, int attribute,
                                             const void* data, size_t bytes) {
  return cublasLtMatmulDescSetAttribute(preference, attribute, data, bytes);
}

// The algorithm stores the alignment that it was chosen for.
API int cublasLtMatmulAlgoGetHeuristic(lt::Handle, lt::MatmulDesc desc, lt::MatrixLayout a,
                                       lt::MatrixLayout b, lt::MatrixLayout, lt::MatrixLayout d,
                                       lt::Preference preference, int, lt::Heuristic* found,
                                       int* count) {
  if (!IsSupported(*static_cast<Desc*>(desc), *static_cast<Layout*>(a), *static_cast<Layout*>(b),
                   *static_cast<Layout*>(d))) {
    *count = 0;
    return lt::kNotSupported;
  }
  const Desc& wish = *static_cast<Desc*>(preference);
  const auto epilogue = static_cast<Desc*>(desc)->Get<uint32_t>(lt::kEpilogue, lt::kDefault);
  const auto element = static_cast<uint32_t>(Bytes(static_cast<Layout*>(a)->type));
  const bool asks_for_some = wish.Get<uint32_t>(lt::kMinAlignmentA, 256) != element;
  if (fake_refuses_all || (fake_refuses_epilogues && epilogue != lt::kDefault) ||
      (fake_refuses_alignments && asks_for_some)) {
    *count = 0;
    return lt::kNotSupported;
  }
  const lt::PreferenceAttribute of[] = {lt::kMinAlignmentA, lt::kMinAlignmentB, lt::kMinAlignmentD};
  for (int i = 0; i < 3; ++i) found->algorithm.data[i] = wish.Get<uint32_t>(of[i], 256);
  found->workspace_bytes = wish.Get<uint64_t>(lt::kMaxWorkspaceBytes) / 2;
  found->state = lt::kSuccess;
  *count = 1;
  return lt::kSuccess;
}

API int cublasLtMatmul(lt::Handle, lt::MatmulDesc described, const void* alpha, const void* a,
                       lt::MatrixLayout a_layout, const void* b, lt::MatrixLayout b_layout,
                       const void* beta, const void*, lt::MatrixLayout, void* d,
                       lt::MatrixLayout d_layout, const lt::Algorithm* algorithm, void* workspace,
                       size_t workspace_bytes, lt::Stream) {
  const Desc& desc = *static_cast<Desc*>(described);
  const Layout& la = *static_cast<Layout*>(a_layout);
  const Layout& lb = *static_cast<Layout*>(b_layout);
  const Layout& ld = *static_cast<Layout*>(d_layout);
  const void* pointers[] = {a, b, d};
  for (int i = 0; i < 3; ++i) {
    if (reinterpret_cast<uintptr_t>(pointers[i]) % algorithm->data[i] != 0) return 7;
  }
  if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 ||
      reinterpret_cast<uintptr_t>(workspace) % 256 != 0 || !IsSupported(desc, la, lb, ld)) {
    return 7;
  }
  std::memset(workspace, 0xff, workspace_bytes);
  const bool ta = desc.Get<int32_t>(lt::kTransA), tb = desc.Get<int32_t>(lt::kTransB);
  const int64_t k = ta ? la.rows : la.columns;
  const auto epilogue = desc.Get<uint32_t>(lt::kEpilogue, lt::kDefault);
  const auto* bias = desc.Get<const char*>(lt::kBiasPointer);
  auto* aux = const_cast<char*>(desc.Get<const char*>(lt::kEpilogueAuxPointer));
  const auto aux_ld = desc.Get<int64_t>(lt::kEpilogueAuxLd);
  const auto* a_scale = desc.Get<const char*>(lt::kAScalePointer);
  const auto* b_scale = desc.Get<const char*>(lt::kBScalePointer);
  const bool blocks = desc.Get<int32_t>(lt::kAScaleMode) == lt::kVec32UE8M0;
  for (int64_t i = 0; i < static_cast<int64_t>(ld.rows); ++i) {
    for (int64_t j = 0; j < static_cast<int64_t>(ld.columns); ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        float x = Load(a, la.type, ta ? i * la.ld + l : l * la.ld + i);
        float y = Load(b, lb.type, tb ? l * lb.ld + j : j * lb.ld + l);
        if (blocks) {
          x *= BlockScale(a_scale, i, l / 32, k / 32);
          y *= BlockScale(b_scale, j, l / 32, k / 32);
        }
        sum += x * y;
      }
      if (a_scale && !blocks) {
        sum *= *reinterpret_cast<const float*>(a_scale) * *reinterpret_cast<const float*>(b_scale);
      }
      if (epilogue & lt::kBias) sum += Load(bias, ld.type, i);
      if (epilogue & lt::kDGelu) {
        sum *= static_cast<float>(GeluDerivative(Load(aux, ld.type, j * aux_ld + i)));
      } else if (epilogue & lt::kGelu) {
        if (epilogue & lt::kAux) Store(aux, ld.type, j * aux_ld + i, sum);
        sum = static_cast<float>(Gelu(sum));
      }
      Store(d, ld.type, j * ld.ld + i, sum);
    }
  }
  return lt::kSuccess;
}
