// Messages for errors found on a device, and which ranks have not come.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/call.h"

namespace cpd {

// `op` begins the message; `num_ranks` and `num_groups` are those of the call.
std::string Describe(const std::string& op, const kernels::ErrorRecord& error, int num_ranks,
                     int num_groups);

// The ranks that have not come to a call: `arrived` has the last call to which each has come.
std::vector<int> MissingRanks(const uint64_t* arrived, int num_ranks, uint64_t call);

}  // namespace cpd
