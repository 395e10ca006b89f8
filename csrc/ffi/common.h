// The common part of all handlers: types, errors, completions.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "numerics/element.h"
#include "numerics/int_array.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// The handlers of a custom call, by the name under which JAX registers it.
struct Target {
  const char* name;
  XLA_FFI_Handler* prepare;  // before the program runs
  XLA_FFI_Handler* execute;
};

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

}  // namespace cpd
