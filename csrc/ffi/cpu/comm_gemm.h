// Python bindings of overlapped GEMMs: the registry of their buffers, the BLAS, recorded spans.
#pragma once

#include "nanobind/nanobind.h"

namespace cpd {

void BindCommGemm(nanobind::module_& m);

}  // namespace cpd
