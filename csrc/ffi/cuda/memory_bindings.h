// The functions of the CUDA module about memory that several GPUs access.
#pragma once

#include "nanobind/nanobind.h"

namespace cpd {

void BindMemory(nanobind::module_& m);

}  // namespace cpd
