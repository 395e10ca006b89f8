// XLA FFI handlers of the CPU transports, and the Python module that hands them to JAX.
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch/dispatch.h"
#include "nanobind/nanobind.h"
#include "transport/in_process.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace cpd {
namespace {

// ---- Call sites: XLA makes one state per custom call of a program. An id chosen when JAX lowers
// would not do: lowerings are cached, so two calls can share one.

struct CallSite {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  int64_t uid;
};
ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite() {
  static std::atomic<int64_t> next_uid{1};
  auto site = std::make_unique<CallSite>();
  site->uid = next_uid++;
  return ffi::ErrorOr<std::unique_ptr<CallSite>>(std::move(site));
}

XLA_FFI_DEFINE_HANDLER(BoundMakeCallSite, MakeCallSite, ffi::Ffi::BindInstantiate());

// The state's type is registered here, with the backend that is already up: JAX's own hook
// replays handlers before types, which keeps the CPU backend from starting.
XLA_FFI_Error* InstantiateCallSite(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once, [&] {
    error = ffi::Ffi::RegisterTypeId(frame->api, "jax_cp_dispatch.CallSite", &CallSite::id,
                                     &CallSite::info);
  });
  return error ? error : BoundMakeCallSite(frame);
}

// ---- From XLA's types to ours.

DataType ToDataType(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return DataType::kBF16;
    case ffi::F16:
      return DataType::kF16;
    case ffi::F32:
    case ffi::C64:  // complex numbers sum as twice as many real ones
      return DataType::kF32;
    case ffi::F64:
    case ffi::C128:
      return DataType::kF64;
    case ffi::S8:
      return DataType::kI8;
    case ffi::U8:
      return DataType::kU8;
    case ffi::S16:
      return DataType::kI16;
    case ffi::U16:
      return DataType::kU16;
    case ffi::S32:
      return DataType::kI32;
    case ffi::U32:
      return DataType::kU32;
    case ffi::S64:
      return DataType::kI64;
    case ffi::U64:
      return DataType::kU64;
    default:
      return DataType::kOther;
  }
}

RowArray ToRows(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  int64_t row_bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  for (size_t i = 1; i < dims.size(); ++i) row_bytes *= dims[i];
  return {static_cast<char*>(buffer.untyped_data()), dims[0], row_bytes};
}

ffi::Error ToError(const Status& status) {
  switch (status.code) {
    case StatusCode::kOk:
      return ffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return ffi::Error::InvalidArgument(status.message);
    case StatusCode::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message);
    case StatusCode::kInternal:
      return ffi::Error::Internal(status.message);
  }
  return ffi::Error::Internal(status.message);
}

// Completes one rank. The thread that does so runs the rest of that rank's program, under the
// floating-point environment that XLA set up on the rank's own thread.
Completion CompleteWith(std::shared_ptr<ffi::Promise> promise) {
  std::fenv_t environment;
  std::fegetenv(&environment);
  return [promise = std::move(promise), environment](const Status& status) {
    std::fesetenv(&environment);
    if (status.ok()) {
      promise->SetAvailable();
    } else {
      promise->SetError(ToError(status));
    }
  };
}

enum class Direction { kDispatch, kCombine };

ffi::Future Move(Direction direction, ffi::ThreadPool pool, CallSite* site, ffi::RunId run_id,
                 ffi::BufferR1<ffi::S32> rank_and_group, ffi::BufferR2<ffi::S32> dst_rank,
                 ffi::BufferR2<ffi::U32> dst_offset, ffi::BufferR1<ffi::U32> seq_len,
                 ffi::BufferR1<ffi::U32> src_offset, ffi::BufferR1<ffi::U32> num_recv,
                 ffi::RemainingArgs arrays, ffi::RemainingRets results, std::string_view axis,
                 int64_t deadline_ms) {
  const bool is_dispatch = direction == Direction::kDispatch;
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);

  auto mine = std::make_unique<DispatchContribution>();
  for (size_t i = 0; i < results.size(); ++i) {
    const RowArray in = ToRows(*arrays.get<ffi::AnyBuffer>(i));
    const ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(i);
    mine->tokens.push_back(is_dispatch ? in : ToRows(result));
    mine->buffers.push_back(is_dispatch ? ToRows(result) : in);
    mine->types.push_back({ToDataType(arrays.get<ffi::AnyBuffer>(i)->element_type()),
                           ToDataType(result.element_type())});
  }
  mine->num_slots = dst_rank.dimensions()[0];
  mine->num_replicas = dst_rank.dimensions()[1];
  mine->dst_rank = dst_rank.typed_data();
  mine->dst_offset = dst_offset.typed_data();
  mine->seq_len = seq_len.typed_data();
  mine->src_offset = src_offset.typed_data();
  mine->num_recv = num_recv.typed_data();

  const int num_ranks = static_cast<int>(num_recv.dimensions()[0]) - 1;
  const int rank = rank_and_group.typed_data()[0];
  const int64_t group = rank_and_group.typed_data()[1];
  Exchange exchange;
  exchange.op =
      std::string(is_dispatch ? "dispatch" : "combine") + " over axis '" + std::string(axis) + "'";
  exchange.key = {run_id.run_id, site->uid, group};
  exchange.num_ranks = num_ranks;
  exchange.deadline = std::chrono::milliseconds(deadline_ms);
  exchange.planner = [is_dispatch, op = exchange.op](const auto& ranks, WorkList* work) {
    return is_dispatch ? PlanDispatch(op, ranks, work) : PlanCombine(op, ranks, work);
  };
  const int num_helpers = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) - 1);
  InProcessTransport().Join(
      exchange, rank, std::move(mine), CompleteWith(std::move(promise)), num_helpers,
      [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

template <Direction kDirection>
ffi::Future MoveIn(ffi::ThreadPool pool, CallSite* site, ffi::RunId run_id,
                   ffi::BufferR1<ffi::S32> rank_and_group, ffi::BufferR2<ffi::S32> dst_rank,
                   ffi::BufferR2<ffi::U32> dst_offset, ffi::BufferR1<ffi::U32> seq_len,
                   ffi::BufferR1<ffi::U32> src_offset, ffi::BufferR1<ffi::U32> num_recv,
                   ffi::RemainingArgs arrays, ffi::RemainingRets results, std::string_view axis,
                   int64_t deadline_ms) {
  try {
    return Move(kDirection, pool, site, run_id, rank_and_group, dst_rank, dst_offset, seq_len,
                src_offset, num_recv, arrays, results, axis, deadline_ms);
  } catch (const std::exception& error) {  // no memory or no thread: this rank did not arrive
    ffi::Promise promise;
    promise.SetError(ffi::Error::Internal(std::string("jax_cp_dispatch: ") + error.what()));
    return ffi::Future(promise);
  }
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()               // the same on all ranks of one execution
      .Arg<ffi::BufferR1<ffi::S32>>()  // rank_and_group [2]
      .Arg<ffi::BufferR2<ffi::S32>>()  // dst_rank       [S, C]
      .Arg<ffi::BufferR2<ffi::U32>>()  // dst_offset     [S, C]
      .Arg<ffi::BufferR1<ffi::U32>>()  // seq_len        [S]
      .Arg<ffi::BufferR1<ffi::U32>>()  // src_offset     [S]
      .Arg<ffi::BufferR1<ffi::U32>>()  // num_recv       [W + 1]
      .RemainingArgs()                 // dispatch: x... [T, feature...], then storage to reuse
                                       // combine: y... [capacity, feature...]
      .RemainingRets()                 // dispatch: [capacity, feature...], combine: [T, feature...]
      .Attr<std::string_view>("axis")  // for messages
      .Attr<int64_t>("deadline_ms");
}

XLA_FFI_DEFINE_HANDLER(DispatchHandler, MoveIn<Direction::kDispatch>, Binding());
XLA_FFI_DEFINE_HANDLER(CombineHandler, MoveIn<Direction::kCombine>, Binding());

// ---- The Python module.

nb::dict Registrations() {
  const auto stages = [](XLA_FFI_Handler* execute) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(&InstantiateCallSite));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
    return stages;
  };
  nb::dict targets;
  targets["jax_cp_dispatch.dispatch"] = stages(DispatchHandler);
  targets["jax_cp_dispatch.combine"] = stages(CombineHandler);
  return targets;
}

}  // namespace
}  // namespace cpd

NB_MODULE(_cpu, m) {
  m.doc() = "XLA FFI handlers of dispatch and combine on CPU.";
  m.def("registrations", &cpd::Registrations, "Target name -> stage name -> handler capsule.");
  m.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers that this was built with.");
}
