// The common part of all handlers: types, errors, completions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "numerics/element.h"
#include "numerics/int_array.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

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
xla::ffi::Error ToError(const Status& status);
xla::ffi::Future Failed(const Status& status);

// The completion of one rank. The thread that runs it continues that rank's program, under the
// floating-point environment of this call, which XLA set up on the rank's own thread. `held` is
// released first: code that has waited for the program may destroy it.
Completion CompleteWith(std::shared_ptr<xla::ffi::Promise> promise, std::shared_ptr<void> held);

}  // namespace cpd
