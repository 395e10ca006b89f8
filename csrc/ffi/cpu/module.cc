// The Python module with the XLA FFI handlers and registries for CPU.
#include "ffi/cpu/comm_gemm.h"
#include "ffi/cpu/dispatch_buffers.h"
#include "ffi/cpu/planner.h"
#include "ffi/cpu/processes.h"
#include "ffi/cpu/targets.h"
#include "nanobind/nanobind.h"

namespace nb = nanobind;

namespace cpd {
namespace {

// Target name -> stage name -> handler.
nb::dict Registrations() {
  nb::dict targets;
  for (const auto& all : {DispatchTargets(), GemmTargets(), GroupedGemmTargets()}) {
    for (const Target& target : all) {
      nb::dict stages;
      stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(target.instantiate));
      stages["execute"] = nb::capsule(reinterpret_cast<void*>(target.execute));
      targets[target.name] = stages;
    }
  }
  return targets;
}

}  // namespace
}  // namespace cpd

NB_MODULE(_cpu, m) {
  m.doc() = "XLA FFI handlers on CPU, and the registries of buffers.";
  m.def("registrations", &cpd::Registrations, "Target name -> stage name -> handler capsule.");
  m.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers that this was built with.");
  cpd::BindBuffers(m);
  cpd::BindCommGemm(m);
  cpd::BindPlanner(m);
  cpd::BindProcesses(m);
}
