// What the handlers of every operation share: call sites, types, errors, completions.
#include "ffi/common.h"

#include <atomic>
#include <cfenv>
#include <mutex>
#include <utility>

namespace ffi = xla::ffi;

namespace cpd {

ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite() {
  static std::atomic<int64_t> next_uid{1};
  auto site = std::make_unique<CallSite>();
  site->uid = next_uid++;
  return ffi::ErrorOr<std::unique_ptr<CallSite>>(std::move(site));
}

XLA_FFI_DEFINE_HANDLER(BoundMakeCallSite, MakeCallSite, ffi::Ffi::BindInstantiate());

}  // namespace

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

std::optional<IntType> ToIntType(ffi::DataType type) {
  switch (type) {
    case ffi::S32:
      return IntType::kI32;
    case ffi::U32:
      return IntType::kU32;
    case ffi::S64:
      return IntType::kI64;
    case ffi::U64:
      return IntType::kU64;
    default:
      return std::nullopt;
  }
}

DataType ToDataType(ffi::DataType type) {
  switch (type) {
    case ffi::F8E4M3FN:
      return DataType::kE4M3;
    case ffi::F8E5M2:
      return DataType::kE5M2;
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

ffi::Future Failed(const Status& status) {
  ffi::Promise promise;
  promise.SetError(ToError(status));
  return ffi::Future(promise);
}

Completion CompleteWith(std::shared_ptr<ffi::Promise> promise, std::shared_ptr<void> held) {
  std::fenv_t environment;
  std::fegetenv(&environment);
  return [promise = std::move(promise), held = std::move(held),
          environment](const Status& status) mutable {
    std::fesetenv(&environment);
    held.reset();
    if (status.ok()) {
      promise->SetAvailable();
    } else {
      promise->SetError(ToError(status));
    }
  };
}

}  // namespace cpd
