// Python bindings of the planner: documents to pieces.
#pragma once

#include "nanobind/nanobind.h"

namespace cpd {

void BindPlanner(nanobind::module_& m);

}  // namespace cpd
