// XLA FFI handlers of attention to one range of keys per query. They enqueue kernels; the host
// never waits.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/attention_kernels.h"
#include "ffi/common.h"
#include "ffi/cuda/targets.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

using Bf16s = ffi::Buffer<ffi::BF16>;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

const uint16_t* Bits(const Bf16s& x) { return reinterpret_cast<const uint16_t*>(x.typed_data()); }

Status Invalid(const std::string& op, const std::string& got) {
  return Status::Invalid(op + ": the kernel got " + got +
                         "; this is a fault of jax_cp_dispatch, please report it");
}

// What both calls read. Blocked arrays [matrices, blocks, rows, H]; rows of all blocks are
// contiguous.
struct Operands {
  Bf16s q, k, v;
  Ints start, end;
  float scale;
};

Status Read(const std::string& op, const Operands& x, kernels::AttentionOperands* of) {
  const auto rows = x.q.dimensions(), keys = x.k.dimensions();
  if (rows.size() != 4 || keys.size() != 4 || rows[0] != keys[0] || rows[3] != keys[3]) {
    return Invalid(op, "q and k of different matrices or heads");
  }
  const int64_t num_rows = rows[1] * rows[2], num_keys = keys[1] * keys[2];
  if (num_rows >= kernels::kNone - kernels::kTile || num_keys >= kernels::kNone - kernels::kTile) {
    return Invalid(op, "more than 2^31 rows");
  }
  const auto all_rows = static_cast<size_t>(rows[0] * num_rows);
  if (x.v.element_count() != x.k.element_count() || x.start.element_count() != all_rows ||
      x.end.element_count() != all_rows) {
    return Invalid(op, "v or ranges of another size");
  }
  *of = {Bits(x.q),
         Bits(x.k),
         Bits(x.v),
         x.start.typed_data(),
         x.end.typed_data(),
         rows[0],
         static_cast<int>(num_rows),
         static_cast<int>(num_keys),
         x.scale};
  return {};
}

ffi::Error Ended(const std::string& op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ToError({StatusCode::kInternal, op + ": " + cudaGetErrorString(error)});
}

Status Begin(const std::string& op, int device, bool executes) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess && !executes) error = LoadAttentionKernels();
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return {StatusCode::kInternal,
          op + ": loading kernels on GPU " + std::to_string(device) +
              " failed: " + cudaGetErrorString(error) +
              ". Rebuild the package for this GPU, or set JAX_CP_DISPATCH_ATTENTION_KERNEL=0."};
}

template <bool kExecute>
ffi::Error AttendIn(int32_t device, cudaStream_t stream, Bf16s q, Bf16s k, Bf16s v, Ints start,
                    Ints end, ffi::RemainingArgs seen, ffi::Result<Floats> peak,
                    ffi::Result<Floats> total, ffi::Result<Floats> acc, float scale) {
  const std::string op = "local_attention";
  Status status = Begin(op, device, kExecute);
  if (!status.ok() || !kExecute) return ToError(status);
  kernels::AttendCall call{};
  status = Read(op, {q, k, v, start, end, scale}, &call);
  if (!status.ok()) return ToError(status);
  const float* of_seen[3] = {};
  if (seen.size() != 0 && seen.size() != 3) return ToError(Invalid(op, "a part of a softmax"));
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto x = seen.get<Floats>(i);
    if (!x.has_value()) return ToError(Invalid(op, "an online softmax that is not float32"));
    of_seen[i] = x->typed_data();
  }
  call.seen_peak = of_seen[0];
  call.seen_total = of_seen[1];
  call.seen_acc = of_seen[2];
  call.peak = peak->typed_data();
  call.total = total->typed_data();
  call.acc = acc->typed_data();
  return Ended(op, LaunchAttend(call, static_cast<int>(q.dimensions()[3]), stream));
}

template <bool kExecute>
ffi::Error GradientsIn(int32_t device, cudaStream_t stream, Bf16s q, Bf16s k, Bf16s v, Ints start,
                       Ints end, Bf16s dout, Floats lse, Floats delta, ffi::Result<Floats> dq,
                       ffi::Result<Floats> dk, ffi::Result<Floats> dv, ffi::Result<Ints> reach,
                       float scale) {
  const std::string op = "local_attention_backward";
  Status status = Begin(op, device, kExecute);
  if (!status.ok() || !kExecute) return ToError(status);
  kernels::GradientsCall call{};
  status = Read(op, {q, k, v, start, end, scale}, &call);
  if (!status.ok()) return ToError(status);
  const int64_t num_tiles = call.num_matrices * kernels::NumTiles(call.num_rows);
  if (reach->element_count() != static_cast<size_t>(2 * num_tiles)) {
    return ToError(Invalid(op, "scratch memory of another size"));
  }
  call.dout = Bits(dout);
  call.lse = lse.typed_data();
  call.delta = delta.typed_data();
  call.reach = reach->typed_data();
  call.dq = dq->typed_data();
  call.dk = dk->typed_data();
  call.dv = dv->typed_data();
  return Ended(op, LaunchGradients(call, static_cast<int>(q.dimensions()[3]), stream));
}

template <ffi::ExecutionStage kStage>
auto BindOperands() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<Bf16s>()  // q
      .template Arg<Bf16s>()  // k
      .template Arg<Bf16s>()  // v
      .template Arg<Ints>()   // start
      .template Arg<Ints>();  // end
}

template <ffi::ExecutionStage kStage>
auto BindAttend() {
  return BindOperands<kStage>()
      .RemainingArgs()  // peak, total and acc of other keys; or none
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Attr<float>("scale");
}

template <ffi::ExecutionStage kStage>
auto BindGradients() {
  return BindOperands<kStage>()
      .template Arg<Bf16s>()   // dout
      .template Arg<Floats>()  // lse
      .template Arg<Floats>()  // delta
      .template Ret<Floats>()  // dq
      .template Ret<Floats>()  // dk
      .template Ret<Floats>()  // dv
      .template Ret<Ints>()    // reach: scratch memory
      .template Attr<float>("scale");
}

XLA_FFI_DEFINE_HANDLER(InitializeAttend, AttendIn<false>, BindAttend<kInitialize>());
XLA_FFI_DEFINE_HANDLER(ExecuteAttend, AttendIn<true>, BindAttend<kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(InitializeGradients, GradientsIn<false>, BindGradients<kInitialize>());
XLA_FFI_DEFINE_HANDLER(ExecuteGradients, GradientsIn<true>, BindGradients<kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<CudaTarget> CudaAttentionTargets() {
  return {{"jax_cp_dispatch.attend", InitializeAttend, ExecuteAttend},
          {"jax_cp_dispatch.attention_gradients", InitializeGradients, ExecuteGradients}};
}

}  // namespace cpd
