// Reads the operands of attention from XLA's buffers; a shape or type that the kernels do not take
// is a fault of this package.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/attention_kernels.h"
#include "ffi/common.h"
#include "xla/ffi/api/ffi.h"

namespace cpd::attention {

using Any = xla::ffi::AnyBuffer;
using Ints = xla::ffi::Buffer<xla::ffi::S32>;
using Floats = xla::ffi::Buffer<xla::ffi::F32>;

inline Status Invalid(const std::string& op, const std::string& got) {
  return Status::Invalid(op + ": the kernel got " + got +
                         "; this is a fault of jax_cp_dispatch, please report it");
}

inline const uint16_t* Bits(const Any& x) { return static_cast<const uint16_t*>(x.untyped_data()); }

inline bool HasShape(const Any& x, const std::vector<int64_t>& shape) {
  const auto dims = x.dimensions();
  return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

// What both calls read: arrays [batch, rows, heads, size], and the keys of each row.
struct Operands {
  Any q, k, v;
  Ints start, end;
  float scale, soft_cap;

  HeadType Heads() const {
    return {ToDataType(q.element_type()), static_cast<int>(q.dimensions()[3]),
            static_cast<int>(v.dimensions()[3])};
  }
  std::vector<int64_t> OfQueries(int64_t size) const {
    const auto rows = q.dimensions();
    return {rows[0], rows[1], rows[2], size};
  }
  // Of numbers of each row.
  size_t NumRows() const {
    const auto rows = q.dimensions();
    return static_cast<size_t>(rows[0] * rows[1] * rows[2]);
  }
  bool IsOfRows(const Floats& x) const { return x.element_count() == NumRows(); }
  // Whether an array is float, or has the type of the elements.
  bool IsFloat(const Any& x) const {
    return x.element_type() == xla::ffi::F32 || x.element_type() == q.element_type();
  }
};

inline Status Read(const std::string& op, const Operands& x, kernels::AttentionOperands* of) {
  const auto rows = x.q.dimensions(), keys = x.k.dimensions(), values = x.v.dimensions();
  if (rows.size() != 4 || keys.size() != 4 || values.size() != 4 || rows[0] != keys[0] ||
      rows[3] != keys[3] || keys[2] <= 0 || rows[2] % keys[2] != 0 ||
      !std::equal(keys.begin(), keys.end() - 1, values.begin())) {
    return Invalid(op, "q, k and v of different batches or heads");
  }
  if (x.k.element_type() != x.q.element_type() || x.v.element_type() != x.q.element_type()) {
    return Invalid(op, "q, k and v of different types");
  }
  constexpr int64_t kMost = kernels::kNone - kernels::kTile;
  if (rows[0] * rows[1] >= kMost || keys[1] >= kMost || rows[2] * rows[3] >= kMost ||
      values[2] * values[3] >= kMost) {
    return Invalid(op, "2^31 rows or elements of a row");
  }
  const auto all_rows = static_cast<size_t>(rows[0] * rows[1]);
  if (x.start.element_count() != all_rows || x.end.element_count() != all_rows) {
    return Invalid(op, "ranges of another size");
  }
  *of = {Bits(x.q),
         Bits(x.k),
         Bits(x.v),
         x.start.typed_data(),
         x.end.typed_data(),
         static_cast<int>(rows[0]),
         static_cast<int>(rows[1]),
         static_cast<int>(keys[1]),
         static_cast<int>(rows[2]),
         static_cast<int>(keys[2]),
         x.scale,
         x.soft_cap,
         nullptr,
         nullptr,
         nullptr};
  return {};
}

// The first three remaining arguments: the index of each row, and the range of each key.
inline Status ReadQueries(const std::string& op, const xla::ffi::RemainingArgs& arguments,
                          kernels::AttentionOperands* of) {
  const auto numbers = [&](size_t i, int64_t size) -> const int32_t* {
    if (i >= arguments.size()) return nullptr;
    const auto x = arguments.get<Ints>(i);
    const auto wanted = static_cast<size_t>(of->batch * size);
    return x.has_value() && x->element_count() == wanted ? x->typed_data() : nullptr;
  };
  of->index = numbers(0, of->num_rows);
  of->first_query = numbers(1, of->num_keys);
  of->end_query = numbers(2, of->num_keys);
  if (of->index && of->first_query && of->end_query) return {};
  return Invalid(op, "ranges of queries of another size");
}

// Rows of floats; an invalid status if they have another shape or type.
template <typename To>
Status ReadFloats(const std::string& op, const Operands& of, Any x,
                  const std::vector<int64_t>& shape, To* to) {
  if (!HasShape(x, shape) || !of.IsFloat(x)) return Invalid(op, "rows of another shape or type");
  to->data = x.untyped_data();
  to->is_wide = x.element_type() == xla::ffi::F32;
  return {};
}

// Numbers of each row, of all heads.
template <typename T>
Status ReadNumbers(const std::string& op, const Operands& of, const Floats& x, T** to) {
  if (!of.IsOfRows(x)) return Invalid(op, "numbers of another count of rows");
  *to = x.typed_data();
  return {};
}

}  // namespace cpd::attention
