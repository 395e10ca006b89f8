// Windows of NCCL: XLA's communicator of the ranks of a call, and memory that is registered there.
// Needs no CUDA. Has not run on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/slab.h"
#include "ffi/cuda/dispatch_call.h"
#include "kernels/call.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// What a handler asks XLA by.
struct CallContext {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* ctx;
};

// Why NCCL cannot be used here; empty: it can.
const std::string& WhyNoNccl();

// Requests the communicator of the ranks of a call, or gets it, if there is a place for it. XLA's
// collectives use it too.
Status AskForCommunicator(const std::string& op, const CudaOptions& options,
                          const CallContext& context, void** communicator);

// Allocates memory by NCCL and registers it, with all ranks and in the same order on all of them;
// `memory` is that of each rank. Of the call, its ranks and its program are known.
Status RegisterWindow(const SlabRequest& request, const kernels::Call& call, void* communicator,
                      std::vector<char*>* memory);

// ---- XLA's collectives extension, which jaxlib has since 0.11.2. The package is built with older
// headers, so what it uses is declared here. Minor versions only append to these structs, which
// tests/native/test_nccl_window.py compares with XLA's.

namespace collectives {

constexpr int64_t kExtension = 129;
constexpr int32_t kMajorVersion = 0, kLeastMinorVersion = 1;
constexpr int32_t kFlattenedId = 3;  // groups name devices by their numbers in the program

struct ExtensionBase {
  size_t struct_size;
  int64_t type;
  int32_t major_version, minor_version;
  const ExtensionBase* next;
};
struct FindArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* ctx;
  int64_t type;
  const ExtensionBase* extension;  // out
};
using Find = XLA_FFI_Error* (*)(FindArgs*);
// `Find` is the member of XLA_FFI_Api behind the last one of the oldest headers.
constexpr size_t kFindOffset = offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*);

struct Group {
  const int64_t* ids;
  size_t size;
};
struct Args {
  size_t struct_size;
  void* extension_start;
  int32_t group_mode;
  const Group* groups;
  size_t num_groups;
  int64_t communication_id;
  void* communicator;  // out: an ncclComm_t, which XLA owns; a request ends before it
};
struct Extension {
  ExtensionBase base;
  void* state;
  XLA_FFI_Error* (*request_communicator)(const Extension*, Args*);  // while preparing
  XLA_FFI_Error* (*get_communicator)(const Extension*, Args*);      // later
};

}  // namespace collectives

}  // namespace cpd

namespace xla::ffi {

template <>
struct CtxDecoding<cpd::CallContext> {
  using Type = cpd::CallContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine&) {
    return Type{api, ctx};
  }
};

}  // namespace xla::ffi
