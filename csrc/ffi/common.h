// The common part of all handlers: types, errors, completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/element.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// The handlers of a custom call, by the name under which JAX registers it. Without a handler, a
// stage does nothing.
struct Target {
  const char* name;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize = nullptr;   // in every execution, before the program runs
  XLA_FFI_Handler* instantiate = nullptr;  // once per program
  XLA_FFI_Handler* prepare = nullptr;      // before that: what the call needs of XLA
};

// A handler of this function, whose operands `kBind` binds.
template <auto kFunction, auto kBind, xla::ffi::Traits... kTraits>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* const handler = kBind().To(kFunction, {kTraits...}).release();
  return handler->Call(frame);
}

// nullopt unless the type is an integer of 32 or 64 bits.
std::optional<IntType> ToIntType(xla::ffi::DataType type);
// Complex types map to the type of their parts: a complex sum is two real sums.
DataType ToDataType(xla::ffi::DataType type);
// As above, but kOther for complex types.
DataType ToRealType(xla::ffi::DataType type);
// -1 if the product exceeds 63 bits, even if another dimension is 0.
int64_t NumElements(const xla::ffi::AnyBuffer& buffer);
int64_t NumBytes(const xla::ffi::AnyBuffer& buffer);
bool IsArray(const xla::ffi::AnyBuffer& buffer, DataType type, int64_t num_elements);
// Call it for a result before writing. XLA allocates large arrays anew each time; faulting them in
// page by page takes several times as long as copying into them.
void PreferHugePages(void* data, int64_t num_bytes);
// What only another version of this package's Python passes.
template <typename... What>
Status NotOurs(const std::string& op, const What&... what) {
  return Status::Invalid(op, ": the operands are not those of this version's primitives: ", what...,
                         ". Call it through jax_cp_dispatch.");
}
xla::ffi::Error ToError(const Status& status);
// What a handler throws, for want of memory or threads, is its error.
template <typename Handler>
Status Caught(Handler handler) {
  try {
    return handler();
  } catch (const std::exception& error) {
    return Status::Internal("jax_cp_dispatch: ", error.what());
  }
}
xla::ffi::Future Failed(const Status& status);

// The completion of one rank. The thread that runs it continues that rank's program, under the
// floating-point environment of this call, which XLA set up on the rank's own thread. `held` is
// released first: code that has waited for the program may destroy it.
Completion CompleteWith(std::shared_ptr<xla::ffi::Promise> promise, std::shared_ptr<void> held);

// ---- The state of a custom call: made once per program. Its executions share it.

// A state derives from this, and has `kTypeName`.
template <typename State>
struct CallState {
  static inline xla::ffi::TypeId id = {};
  static inline xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<State>();
};

// The handler of the instantiate stage. It registers the state's type here, with the running
// backend: JAX's own hook replays handlers before types, which keeps the CPU backend from starting.
template <typename State, auto kMake>
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  using xla::ffi::Ffi;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (State::id == XLA_FFI_UNKNOWN_TYPE_ID) {
    XLA_FFI_Error* error =
        Ffi::RegisterTypeId(frame->api, State::kTypeName, &State::id, &State::info);
    if (error != nullptr) return error;
  }
  static const auto* const handler = Ffi::BindInstantiate().Attrs().To(kMake).release();
  return handler->Call(frame);
}

// ---- Reads the attributes of a custom call by name.

using Counts = xla::ffi::Span<const int64_t>;

// Reads each attribute into a variable of its type. Finish() then fails if one was missing or had
// another type, or if there are others.
class AttributeReader {
 public:
  explicit AttributeReader(const xla::ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <typename T>
  void Read(std::string_view name, T* value) {
    ++num_read_;
    const auto found = attributes_.get<T>(name);
    if (found.has_value()) {
      *value = *found;
    } else if (wrong_.empty()) {
      wrong_ = name;
    }
  }

  // Strings and arrays are copied: attributes may not outlive the call that they are passed to.
  void Read(std::string_view name, std::string* value);
  void Read(std::string_view name, std::vector<int64_t>* value);

  Status Finish() const;

 private:
  const xla::ffi::Dictionary attributes_;
  size_t num_read_ = 0;
  std::string_view wrong_;  // the first missing or mistyped attribute
};

// What all calls of ranks have.
struct RankOptions {
  std::string op;    // the function that was called, for messages
  std::string axis;  // likewise
  int64_t num_ranks;
  int64_t deadline_ms;

  void Read(AttributeReader* attributes);
  std::string OverAxis() const { return op + " over axis '" + axis + "'"; }
  bool HasDeadline() const { return deadline_ms >= 1 && deadline_ms <= kLongestDeadline.count(); }
};

}  // namespace cpd
