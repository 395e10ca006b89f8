// Python bindings of the registry of dispatch buffers: integers in, tuples or ValueError out.
#include "ffi/cpu/dispatch_buffers.h"

#include <chrono>
#include <cstdint>
#include <string>

#include "dispatch/dispatch_buffers.h"
#include "nanobind/stl/string.h"

namespace nb = nanobind;

namespace cpd {
namespace {

void Check(const Status& status) {
  if (!status.ok()) throw nb::value_error(status.message.c_str());
}

// In the order of the fields of DispatchBuffer; the deadline in milliseconds.
nb::tuple ToTuple(const DispatchBufferEntry& entry) {
  return nb::make_tuple(entry.limits.capacity, entry.limits.row_bytes,
                        static_cast<int64_t>(entry.limits.deadline.count()),
                        entry.limits.num_groups, entry.num_in_use, entry.num_calls);
}

}  // namespace

void BindBuffers(nb::module_& m) {
  using nb::arg;
  m.def(
      "create_buffer",
      [](int64_t capacity, int64_t row_bytes, int64_t deadline_ms, int64_t num_groups) {
        int64_t id = 0;
        Check(DispatchBuffers::Get().Create(
            "create_dispatch_buffer",
            {capacity, row_bytes, num_groups, std::chrono::milliseconds(deadline_ms)}, &id));
        return id;
      },
      nb::kw_only(), arg("capacity"), arg("row_bytes"), arg("deadline_ms"), arg("num_groups"));
  m.def(
      "grow_buffer",
      [](const std::string& op, int64_t id, int64_t capacity, int64_t row_bytes,
         int64_t num_groups) {
        Check(DispatchBuffers::Get().Grow(op, id, capacity, row_bytes, num_groups));
      },
      arg("op"), arg("id"), nb::kw_only(), arg("capacity"), arg("row_bytes"), arg("num_groups"));
  m.def(
      "destroy_buffer",
      [](const std::string& op, int64_t id) { Check(DispatchBuffers::Get().Destroy(op, id)); },
      arg("op"), arg("id"));
  m.def(
      "destroy_all_buffers",
      [](const std::string& op) { Check(DispatchBuffers::Get().DestroyAll(op)); }, arg("op"));
  m.def(
      "find_buffer",
      [](const std::string& op, int64_t id) {
        DispatchBufferEntry entry;
        Check(DispatchBuffers::Get().Find(op, id, &entry));
        return ToTuple(entry);
      },
      arg("op"), arg("id"));
  m.def("list_buffers", [] {
    nb::dict buffers;
    for (const auto& [id, entry] : DispatchBuffers::Get().List()) {
      buffers[nb::int_(id)] = ToTuple(entry);
    }
    return buffers;
  });
}

}  // namespace cpd
