// Python bindings of the CPU module, one function for each file.
#pragma once

#include "nanobind/nanobind.h"
#include "transport/transport.h"

namespace cpd {

void BindBuffers(nanobind::module_& m);    // registries of buffers
void BindPlanner(nanobind::module_& m);    // documents to pieces
void BindProcesses(nanobind::module_& m);  // the transport between processes

// Raises ValueError.
inline void Check(const Status& status) {
  if (!status.ok()) throw nanobind::value_error(status.message.c_str());
}

}  // namespace cpd
