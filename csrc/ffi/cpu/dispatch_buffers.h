// Python bindings of the registry of dispatch buffers.
#pragma once

#include "nanobind/nanobind.h"

namespace cpd {

void BindBuffers(nanobind::module_& m);

}  // namespace cpd
