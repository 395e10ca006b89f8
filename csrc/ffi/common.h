// What the handlers of every operation share: call sites, types, errors, completions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "numerics/element.h"
#include "numerics/int_array.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// XLA makes one per custom call of a program. An id chosen when JAX lowers would not do: lowerings
// are cached, so two calls can share one.
struct CallSite {
  static xla::ffi::TypeId id;
  static xla::ffi::TypeInfo info;
  // Unique in this process; or of a program that spans processes, unique in the program and the
  // same in all of them: from the signature, and of equal ones from their order in the program.
  int64_t uid;
  std::string signature;                    // operation, shapes and attributes
  std::vector<std::vector<int>> processes;  // by group, then rank; none: all ranks are here

  // Puts the key and the place of the ranks into `exchange`, whose `num_ranks` is known.
  Status Describe(int64_t run_id, int64_t group, Exchange* exchange) const;
};

// No program is being compiled: call sites that are made from now on belong to others.
void EndPrograms();

// The transport that reaches all ranks of this exchange.
Transport& TransportFor(const Exchange& exchange);

// Attributes that only call sites read: signature and processes.
constexpr size_t kNumCallSiteAttributes = 2;

// The instantiate stage of every handler.
XLA_FFI_Error* InstantiateCallSite(XLA_FFI_CallFrame* frame);

// None: no integers of 32 or 64 bits.
std::optional<IntType> ToIntType(xla::ffi::DataType type);
// Complex numbers as what their parts are: they sum as twice as many real ones.
DataType ToDataType(xla::ffi::DataType type);
// kOther for complex numbers.
DataType ToRealType(xla::ffi::DataType type);
// -1: more than 63 bits hold, though one dimension may be 0.
int64_t NumElements(const xla::ffi::AnyBuffer& buffer);
int64_t NumBytes(const xla::ffi::AnyBuffer& buffer);
bool IsArray(const xla::ffi::AnyBuffer& buffer, DataType type, int64_t num_elements);
// For a result before it is written. XLA takes large arrays fresh from the system each time; page
// by page that takes several times as long as the copy into them.
void PreferHugePages(void* data, int64_t num_bytes);
xla::ffi::Error ToError(const Status& status);
xla::ffi::Future Failed(const Status& status);

// Completes one rank. The thread that does so runs the rest of that rank's program, under the
// floating-point environment that XLA set up on the rank's own thread: that of this call. What
// `held` keeps is released first: whoever has waited for the program may destroy it.
Completion CompleteWith(std::shared_ptr<xla::ffi::Promise> promise, std::shared_ptr<void> held);

}  // namespace cpd
