// Messages for errors found on a device.
#pragma once

#include <string>

#include "kernels/call.h"

namespace cpd {

// `op` begins the message; `num_ranks` and `num_groups` are those of the call.
std::string Describe(const std::string& op, const kernels::ErrorRecord& error, int num_ranks,
                     int num_groups);

}  // namespace cpd
