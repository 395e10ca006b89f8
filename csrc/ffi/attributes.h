// Reads the attributes of a custom call by name.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

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
