// The Python module with the XLA FFI handlers and registries for CPU.
#include "ffi/module.h"

#include "ffi/cpu/bindings.h"
#include "ffi/cpu/targets.h"
#include "gemm/blas.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  m.doc() = "XLA FFI handlers on CPU, and the registries of buffers.";
  cpd::BindTargets(m, "instantiate",
                   {cpd::DispatchTargets(), cpd::GemmTargets(), cpd::GroupedGemmTargets()});
  cpd::BindSpans<cpd::SpanRecorder>(m);
  cpd::BindBuffers(m);
  cpd::BindPlanner(m);
  cpd::BindProcesses(m);
  m.def(
      "load_blas",  // SciPy exports its routines as capsules, named by their C signature
      [](nb::capsule sgemm, nb::capsule dgemm) {
        return cpd::LoadBlas(sgemm.data(), dgemm.data());
      },
      nb::kw_only(), nb::arg("sgemm"), nb::arg("dgemm"));
}
