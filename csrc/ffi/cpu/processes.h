// Python bindings of the transport between processes.
#pragma once

#include "nanobind/nanobind.h"

namespace cpd {

void BindProcesses(nanobind::module_& m);

}  // namespace cpd
