// The common part of all handlers: types, errors, completions.
#include "ffi/common.h"

#include <sys/mman.h>

#include <algorithm>
#include <cfenv>
#include <utility>

namespace ffi = xla::ffi;

namespace cpd {

std::optional<IntType> ToIntType(ffi::DataType type) {
  switch (type) {
    case ffi::S32: return IntType::kI32;
    case ffi::U32: return IntType::kU32;
    case ffi::S64: return IntType::kI64;
    case ffi::U64: return IntType::kU64;
    default: return std::nullopt;
  }
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
    case ffi::F8E4M3FN: return DataType::kE4M3;
    case ffi::F8E5M2: return DataType::kE5M2;
    case ffi::BF16: return DataType::kBF16;
    case ffi::F16: return DataType::kF16;
    case ffi::F32:
    case ffi::C64: return DataType::kF32;
    case ffi::F64:
    case ffi::C128: return DataType::kF64;
    case ffi::S8: return DataType::kI8;
    case ffi::U8: return DataType::kU8;
    case ffi::S16: return DataType::kI16;
    case ffi::U16: return DataType::kU16;
    case ffi::S32: return DataType::kI32;
    case ffi::U32: return DataType::kU32;
    case ffi::S64: return DataType::kI64;
    case ffi::U64: return DataType::kU64;
    default: return DataType::kOther;
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
    case StatusCode::kOk: return ffi::Error::Success();
    case StatusCode::kInvalidArgument: return ffi::Error::InvalidArgument(status.message);
    case StatusCode::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message);
    case StatusCode::kInternal: return ffi::Error::Internal(status.message);
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

// ---- Reads the attributes of a custom call by name.

void AttributeReader::Read(std::string_view name, std::string* value) {
  std::string_view text;
  Read(name, &text);
  *value = text;
}

void AttributeReader::Read(std::string_view name, std::vector<int64_t>* value) {
  Counts counts;
  Read(name, &counts);
  value->assign(counts.begin(), counts.end());
}

Status AttributeReader::Finish() const {
  if (wrong_.empty() && attributes_.size() == num_read_) return Status::Ok();
  const std::string what = wrong_.empty()
                               ? std::to_string(attributes_.size()) + " were given instead of " +
                                     std::to_string(num_read_)
                               : std::string(wrong_) + " is missing or has another type";
  return Status::Invalid(
      "jax_cp_dispatch: the attributes are not those of this version's primitives: ", what,
      ". Call it through jax_cp_dispatch.");
}

void RankOptions::Read(AttributeReader* attributes) {
  attributes->Read("op", &op);
  attributes->Read("axis", &axis);
  attributes->Read("num_ranks", &num_ranks);
  attributes->Read("deadline_ms", &deadline_ms);
}

}  // namespace cpd
