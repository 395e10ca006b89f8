// XLA FFI handlers of attention to one range of keys per query. They enqueue kernels; the host
// never waits.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/attention_kernels.h"
#include "ffi/common.h"
#include "ffi/cuda/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

Status Invalid(const std::string& op, const std::string& got) {
  return Status::Invalid(op, ": the kernel got ", got,
                         "; this is a fault of jax_cp_dispatch, please report it");
}

const uint16_t* Bits(const Any& x) { return static_cast<const uint16_t*>(x.untyped_data()); }

// What both calls read: arrays [batch, rows, heads, size], and the keys of each row.
struct Operands {
  Any q, k, v;
  Ints start, end;
  float scale, soft_cap;

  HeadType Heads() const {
    return {ToDataType(q.element_type()), static_cast<int>(q.dimensions()[3]),
            static_cast<int>(v.dimensions()[3])};
  }
  // Of numbers of each row.
  size_t NumRows() const {
    const auto rows = q.dimensions();
    return static_cast<size_t>(rows[0] * rows[1] * rows[2]);
  }
  // Whether an array is float, or has the type of the elements.
  bool IsFloat(const Any& x) const {
    return x.element_type() == ffi::F32 || x.element_type() == q.element_type();
  }
};

Status Read(const std::string& op, const Operands& x, kernels::AttentionOperands* of) {
  const auto rows = x.q.dimensions(), keys = x.k.dimensions(), values = x.v.dimensions();
  if (rows.size() != 4 || keys.size() != 4 || values.size() != 4 || rows[0] != keys[0] ||
      rows[3] != keys[3] || keys[2] <= 0 || rows[2] % keys[2] != 0 ||
      !std::equal(keys.begin(), keys.end() - 1, values.begin())) {
    return Invalid(op, "q, k and v of different batches or heads");
  }
  if (x.k.element_type() != x.q.element_type() || x.v.element_type() != x.q.element_type()) {
    return Invalid(op, "q, k and v of different types");
  }
  constexpr int64_t kMost = kernels::kNone - kernels::kTile;
  if (rows[0] * rows[1] >= kMost || keys[1] >= kMost || rows[2] * rows[3] >= kMost ||
      values[2] * values[3] >= kMost) {
    return Invalid(op, "2^31 rows or elements of a row");
  }
  const auto all_rows = static_cast<size_t>(rows[0] * rows[1]);
  if (x.start.element_count() != all_rows || x.end.element_count() != all_rows) {
    return Invalid(op, "ranges of another size");
  }
  *of = {Bits(x.q),
         Bits(x.k),
         Bits(x.v),
         x.start.typed_data(),
         x.end.typed_data(),
         static_cast<int>(rows[0]),
         static_cast<int>(rows[1]),
         static_cast<int>(keys[1]),
         static_cast<int>(rows[2]),
         static_cast<int>(keys[2]),
         x.scale,
         x.soft_cap,
         nullptr,
         nullptr,
         nullptr};
  return {};
}

// The first three remaining arguments: the index of each row, and the range of each key.
Status ReadQueries(const std::string& op, const ffi::RemainingArgs& arguments,
                   kernels::AttentionOperands* of) {
  const auto numbers = [&](size_t i, int64_t size) -> const int32_t* {
    if (i >= arguments.size()) return nullptr;
    const auto x = arguments.get<Ints>(i);
    const auto wanted = static_cast<size_t>(of->batch * size);
    return x.has_value() && x->element_count() == wanted ? x->typed_data() : nullptr;
  };
  of->index = numbers(0, of->num_rows);
  of->first_query = numbers(1, of->num_keys);
  of->end_query = numbers(2, of->num_keys);
  if (of->index && of->first_query && of->end_query) return {};
  return Invalid(op, "ranges of queries of another size");
}

// Rows of `count` floats in all; an invalid status if they have another size or type.
template <typename To>
Status ReadFloats(const std::string& op, const Operands& of, Any x, size_t count, To* to) {
  if (x.element_count() != count || !of.IsFloat(x)) {
    return Invalid(op, "rows of another size or type");
  }
  to->data = x.untyped_data();
  to->is_wide = x.element_type() == ffi::F32;
  return {};
}

// Numbers of each row, of all heads.
template <typename T>
Status ReadNumbers(const std::string& op, const Operands& of, const Floats& x, T** to) {
  if (x.element_count() != of.NumRows()) return Invalid(op, "numbers of another count of rows");
  *to = x.typed_data();
  return {};
}

// The numbers of remaining argument i; none if it is missing.
Status ReadMore(const std::string& op, const ffi::RemainingArgs& arguments, size_t i, size_t count,
                const float** to) {
  if (i >= arguments.size()) return {};
  const auto x = arguments.get<Floats>(i);
  if (!x.has_value() || x->element_count() != count) {
    return Invalid(op, "numbers of another type or count");
  }
  *to = x->typed_data();
  return {};
}

// One stage of a call: loads the kernels; or takes the steps that read, up to the first error, and
// launches.
template <bool kExecute, typename Launch, typename Call, typename... Steps>
ffi::Error Run(const std::string& op, int32_t device, cudaStream_t stream, Launch launch,
               const Operands& of, const ffi::RemainingArgs& others, bool has_queries, Call* call,
               Steps... steps) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess && !kExecute) error = LoadAttentionKernels();
  if (error != cudaSuccess) {
    cudaGetLastError();
    return ToError(Status::Internal(
        op, ": loading kernels on GPU ", device, " failed: ", cudaGetErrorString(error),
        ". Rebuild the package for this GPU, or set JAX_CP_DISPATCH_ATTENTION_KERNEL=0."));
  }
  if (!kExecute) return ToError(ExchangeStream::AwaitEnded(op, device, stream));
  Status status = Read(op, of, call);
  if (status.ok() && has_queries) status = ReadQueries(op, others, call);
  ((status = status.ok() ? steps() : status), ...);
  if (!status.ok()) return ToError(status);
  error = launch(*call, of.Heads(), stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ToError(Status::Internal(op, ": ", cudaGetErrorString(error)));
}

// Remaining arguments that are read as ranges of queries, before all others.
size_t NumOfQueries(bool has_queries) { return has_queries ? 3 : 0; }

template <bool kExecute>
ffi::Error AttendIn(int32_t device, cudaStream_t stream, Any q, Any k, Any v, Ints start, Ints end,
                    ffi::RemainingArgs others, ffi::Result<Any> out, ffi::Result<Floats> lse,
                    ffi::RemainingRets peak, float scale, float soft_cap, bool has_queries) {
  const std::string op = "local_attention";
  const Operands of{q, k, v, start, end, scale, soft_cap};
  kernels::AttendCall call{};
  return Run<kExecute>(
      op, device, stream, LaunchAttend, of, others, has_queries, &call,
      [&] { return ReadFloats(op, of, *out, of.NumRows() * v.dimensions()[3], &call.out); },
      [&] { return ReadNumbers(op, of, *lse, &call.lse); },
      [&]() -> Status {
        if (peak.size() == 0) return {};
        auto x = peak.get<Floats>(0);
        if (!x.has_value()) return Invalid(op, "a peak that is not float32");
        return ReadNumbers(op, of, **x, &call.peak);
      },
      [&] {
        const auto heads = static_cast<size_t>(call.batch) * call.num_heads;
        return ReadMore(op, others, NumOfQueries(has_queries), heads, &call.sink);
      });
}

template <bool kExecute>
ffi::Error AttendMoreIn(int32_t device, cudaStream_t stream, Any q, Any k, Any v, Ints start,
                        Ints end, ffi::RemainingArgs others, ffi::Result<Floats> peak,
                        ffi::Result<Floats> total, ffi::Result<Floats> acc, float scale,
                        float soft_cap, bool has_queries) {
  const std::string op = "local_attention";
  const Operands of{q, k, v, start, end, scale, soft_cap};
  const size_t first = NumOfQueries(has_queries);
  kernels::AttendCall call{};
  return Run<kExecute>(
      op, device, stream, LaunchAttend, of, others, has_queries, &call,
      [&] { return ReadNumbers(op, of, *peak, &call.peak); },
      [&] { return ReadNumbers(op, of, *total, &call.total); },
      [&] { return ReadMore(op, others, first, of.NumRows(), &call.seen_peak); },
      [&] { return ReadMore(op, others, first + 1, of.NumRows(), &call.seen_total); },
      [&]() -> Status {
        const size_t num_values = of.NumRows() * v.dimensions()[3];
        if (acc->element_count() != num_values) return Invalid(op, "values of another size");
        call.acc = acc->typed_data();
        return ReadMore(op, others, first + 2, num_values, &call.seen_acc);
      },
      [&]() -> Status {
        if (others.size() == first || call.seen_acc) return {};
        return Invalid(op, "a part of an online softmax");
      });
}

template <bool kExecute>
ffi::Error GradientsIn(int32_t device, cudaStream_t stream, Any q, Any k, Any v, Ints start,
                       Ints end, Any dout, Floats lse, ffi::RemainingArgs others,
                       ffi::Result<Any> dq, ffi::Result<Any> dk, ffi::Result<Any> dv,
                       ffi::Result<Ints> tiles, ffi::Result<Floats> numbers, float scale,
                       float soft_cap, bool has_queries, bool has_delta) {
  const std::string op = "local_attention_backward";
  const Operands of{q, k, v, start, end, scale, soft_cap};
  const size_t first = NumOfQueries(has_queries);
  kernels::GradientsCall call{};
  return Run<kExecute>(
      op, device, stream, LaunchGradients, of, others, has_queries, &call,
      [&]() -> Status {
        const size_t num_values = of.NumRows() * v.dimensions()[3];
        if (dout.element_count() != num_values || dout.element_type() != q.element_type()) {
          return Invalid(op, "dout of another size or type");
        }
        call.dout = Bits(dout);
        if (others.size() == first) return Invalid(op, "neither out nor delta");
        if (has_delta) return ReadMore(op, others, first, of.NumRows(), &call.delta);
        const auto out = others.get<Any>(first);
        if (!out.has_value()) return Invalid(op, "no out");
        return ReadFloats(op, of, *out, num_values, &call.out);
      },
      [&] {
        return has_delta ? Status{} : ReadMore(op, others, first + 1, of.NumRows(), &call.dlse);
      },
      [&] { return ReadNumbers(op, of, lse, &call.lse); },
      [&] { return ReadFloats(op, of, *dq, q.element_count(), &call.dq); },
      [&]() -> Status {
        if (!has_delta || others.size() < first + 2) return {};
        const auto before = others.get<Floats>(first + 1);
        if (!before.has_value() || before->untyped_data() != call.dq.data || !call.dq.is_wide) {
          return Invalid(op, "a dq that is not where the result goes");
        }
        call.dq.adds = true;
        return {};
      },
      [&] { return ReadFloats(op, of, *dk, k.element_count(), &call.dk); },
      [&] { return ReadFloats(op, of, *dv, v.element_count(), &call.dv); },
      [&]() -> Status {
        const auto num_tiles = static_cast<size_t>(call.batch) * kernels::NumTiles(call.num_rows);
        if (sizeof(kernels::QueryTile) / 4 * num_tiles != tiles->element_count() ||
            2 * of.NumRows() != numbers->element_count()) {
          return Invalid(op, "scratch memory of another size");
        }
        call.tiles = reinterpret_cast<kernels::QueryTile*>(tiles->typed_data());
        call.numbers = reinterpret_cast<kernels::RowNumbers*>(numbers->typed_data());
        return {};
      });
}

template <ffi::ExecutionStage kStage>
auto BindOperands() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<Any>()    // q
      .template Arg<Any>()    // k
      .template Arg<Any>()    // v
      .template Arg<Ints>()   // start
      .template Arg<Ints>();  // end
}

template <ffi::ExecutionStage kStage>
auto BindAttend() {
  return BindOperands<kStage>()
      .RemainingArgs()         // of queries, if they have ranges; sink; or none
      .template Ret<Any>()     // out
      .template Ret<Floats>()  // lse
      .RemainingRets()         // peak; or none
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")  // 0: none
      .template Attr<bool>("has_queries");
}

template <ffi::ExecutionStage kStage>
auto BindAttendMore() {
  return BindOperands<kStage>()
      .RemainingArgs()         // peak, total and acc of other keys; or none
      .template Ret<Floats>()  // peak
      .template Ret<Floats>()  // total
      .template Ret<Floats>()  // acc
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")  // 0: none
      .template Attr<bool>("has_queries");
}

template <ffi::ExecutionStage kStage>
auto BindGradients() {
  return BindOperands<kStage>()
      .template Arg<Any>()     // dout
      .template Arg<Floats>()  // lse
      .RemainingArgs()         // delta, and perhaps a dq to add to; or out, and perhaps dlse
      .template Ret<Any>()     // dq
      .template Ret<Any>()     // dk
      .template Ret<Any>()     // dv
      .template Ret<Ints>()    // scratch memory: tiles of queries
      .template Ret<Floats>()  // scratch memory: numbers of rows
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<bool>("has_queries")
      .template Attr<bool>("has_delta");
}

}  // namespace

std::vector<Target> CudaAttentionTargets() {
  constexpr auto kRecords = ffi::Traits::kCmdBufferCompatible;
  return {{"jax_cp_dispatch.attend", Handle<AttendIn<true>, BindAttend<kExecute>, kRecords>,
           Handle<AttendIn<false>, BindAttend<kInitialize>>},
          {"jax_cp_dispatch.attend_more",
           Handle<AttendMoreIn<true>, BindAttendMore<kExecute>, kRecords>,
           Handle<AttendMoreIn<false>, BindAttendMore<kInitialize>>},
          {"jax_cp_dispatch.attention_gradients",
           Handle<GradientsIn<true>, BindGradients<kExecute>, kRecords>,
           Handle<GradientsIn<false>, BindGradients<kInitialize>>}};
}

}  // namespace cpd
