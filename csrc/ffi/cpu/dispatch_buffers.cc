// Python bindings of the registry of dispatch buffers: ids in, ValueError out.
#include "ffi/cpu/dispatch_buffers.h"

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

}  // namespace

void BindBuffers(nb::module_& m) {
  using nb::arg;
  m.def("create_buffer", [] { return DispatchBuffers::Get().Create(); }, "Returns its id.");
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
        BufferUsage usage;
        Check(DispatchBuffers::Get().Find(op, id, &usage));
        return usage.num_in_use;
      },
      arg("op"), arg("id"), "The calls in flight that use it; each rank counts separately.");
}

}  // namespace cpd
