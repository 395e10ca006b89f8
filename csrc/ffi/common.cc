// The common part of all handlers: call sites, types, errors, completions.
#include "ffi/common.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "ffi/attributes.h"
#include "transport/in_process.h"
#include "transport/shared_memory.h"

namespace ffi = xla::ffi;

namespace cpd {

ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

namespace {

// FNV-1a over the signature and the number among equal signatures.
int64_t CallSiteId(std::string_view signature, uint64_t ordinal) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3; };
  for (const char c : signature) add(static_cast<uint8_t>(c));
  for (int i = 0; i < 8; ++i) add(static_cast<uint8_t>(ordinal >> (8 * i)));
  return static_cast<int64_t>(hash);
}

// Call sites of the programs that are being compiled, by signature. XLA creates those of a program
// in an order that depends only on the program.
std::mutex call_sites_mutex;
auto& num_call_sites = *new std::map<std::string, uint64_t>;

uint64_t NumberAmongEquals(const std::string& signature) {
  std::lock_guard<std::mutex> lock(call_sites_mutex);
  return num_call_sites[signature]++;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite(ffi::Dictionary attributes) {
  AttributeReader reader(attributes);
  std::string_view signature;
  Counts processes;
  int64_t num_ranks = 0;
  reader.Read("signature", &signature);
  reader.Read("processes", &processes);
  reader.Read("num_ranks", &num_ranks);
  reader.Skip(attributes.size() - 3);
  if (const Status status = reader.Finish(); !status.ok()) {
    return ffi::Unexpected(ToError(status));
  }
  static std::atomic<int64_t> next_uid{1};
  auto site = std::make_unique<CallSite>();
  site->signature = signature;
  site->uid = processes.size() == 0
                  ? next_uid++
                  : CallSiteId(site->signature, NumberAmongEquals(site->signature));
  const int64_t group_size = std::max<int64_t>(num_ranks, 1);
  for (size_t i = 0; i + group_size <= processes.size(); i += group_size) {
    site->processes.emplace_back(processes.begin() + i, processes.begin() + i + group_size);
  }
  return ffi::ErrorOr<std::unique_ptr<CallSite>>(std::move(site));
}

XLA_FFI_DEFINE_HANDLER(BoundMakeCallSite, MakeCallSite, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace

// Registers the state's type here, with the running backend: JAX's own hook replays handlers before
// types, which keeps the CPU backend from starting.
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

void EndPrograms() {
  std::lock_guard<std::mutex> lock(call_sites_mutex);
  num_call_sites.clear();
}

Status CallSite::Describe(int64_t run_id, int64_t group, Exchange* exchange) const {
  exchange->key = {run_id, uid, group};
  exchange->signature = signature;
  if (processes.empty()) return Status::Ok();
  if (group < 0 || group >= static_cast<int64_t>(processes.size())) {
    return Status::Invalid(exchange->op + ": this rank is in group " + std::to_string(group) +
                           " but the program is for " + std::to_string(processes.size()) +
                           " groups. Every other mesh axis must be manual where this is called.");
  }
  exchange->processes = &processes[group];
  if (SharedMemoryTransport() != nullptr) return Status::Ok();
  return Status::Invalid(
      exchange->op +
      ": the program spans processes, but this process has not joined the others. Call "
      "jax_cp_dispatch.initialize() before the program is compiled.");
}

Transport& TransportFor(const Exchange& exchange) {
  if (exchange.processes != nullptr) {
    for (const int process : *exchange.processes) {
      if (process != ThisProcess()) return *SharedMemoryTransport();
    }
  }
  return InProcessTransport();
}

bool IsArray(const ffi::AnyBuffer& buffer, DataType type, int64_t num_elements) {
  return ToRealType(buffer.element_type()) == type && num_elements >= 0 &&
         NumElements(buffer) == num_elements;
}

void PreferHugePages(void* data, int64_t num_bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  constexpr uintptr_t kLeast = 2 * kHugePage;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + num_bytes) / kHugePage * kHugePage;
  // Only a hint: the result does not matter.
  if (end >= first + kLeast) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
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
    case ffi::C64:
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

DataType ToRealType(ffi::DataType type) {
  return type == ffi::C64 || type == ffi::C128 ? DataType::kOther : ToDataType(type);
}

int64_t NumElements(const ffi::AnyBuffer& buffer) {
  int64_t count = 1;
  for (const int64_t dim : buffer.dimensions()) {
    if (dim < 0 || __builtin_mul_overflow(count, dim, &count)) return -1;
  }
  return count;
}

int64_t NumBytes(const ffi::AnyBuffer& buffer) {
  const int64_t count = NumElements(buffer),
                bytes = ElementBytes(ToRealType(buffer.element_type()));
  int64_t all = 0;
  return count < 0 || __builtin_mul_overflow(count, bytes, &all) ? -1 : all;
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
