// Where a custom call on a GPU stands: on which device, as which rank, and whether it is recorded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/cuda_call.h"
#include "transport/transport.h"

namespace cpd {

struct Placement {
  std::vector<int64_t> places;  // of the ranks of this group
  int rank = 0;                 // the first on this device
  int group = 0;
  bool on_one_device = false;  // which holds all ranks
};

// Makes `device` current. `places` are those of all groups, one after another; one of -1 where a
// device holds all ranks.
Status FindPlacement(const std::string& op, int32_t device, int64_t num_ranks, Counts places,
                     Placement* placement);

bool IsRecorded(cudaStream_t stream);

// Whether each call waits and reports its own errors, instead of leaving them to a later one.
bool ChecksEachCall();

}  // namespace cpd
