// The state of a custom call: its attributes, read once per program. Its executions share it.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/common.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// A state derives from this, and has `kTypeName` and Read(AttributeReader*). It owns what it reads:
// XLA's attributes may not outlive the instantiate stage.
template <typename State>
struct CallState {
  static inline xla::ffi::TypeId id = {};
  static inline xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<State>();
};

template <typename State>
xla::ffi::ErrorOr<std::unique_ptr<State>> MakeState(xla::ffi::Dictionary attributes) {
  try {
    AttributeReader reader(attributes);
    auto state = std::make_unique<State>();
    state->Read(&reader);
    if (const Status status = reader.Finish(); !status.ok()) {
      return xla::ffi::Unexpected(ToError(status));
    }
    return {std::move(state)};
  } catch (const std::exception& error) {
    return xla::ffi::Unexpected(ToError(Status::Internal("jax_cp_dispatch: ", error.what())));
  }
}

// The handler of the instantiate stage. It registers the state's type here, with the running
// backend: JAX's own hook replays handlers before types, which keeps the CPU backend from starting.
template <typename State>
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  using xla::ffi::Ffi;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (State::id == XLA_FFI_UNKNOWN_TYPE_ID) {
    XLA_FFI_Error* error =
        Ffi::RegisterTypeId(frame->api, State::kTypeName, &State::id, &State::info);
    if (error != nullptr) return error;
  }
  static const auto* const handler = Ffi::BindInstantiate().Attrs().To(MakeState<State>).release();
  return handler->Call(frame);
}

}  // namespace cpd
