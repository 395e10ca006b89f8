// The context of a custom call on a GPU: its device, its rank, and whether its stream is being
// recorded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/channels.h"
#include "ffi/cuda/dispatch_call.h"
#include "transport/transport.h"

namespace cpd {

// One stage of a custom call on a GPU.
struct StageOnDevice {
  bool executes;  // otherwise it prepares the program
  int32_t device;
  cudaStream_t stream;
};

// Makes `device` current and finds it among `device_table`; see LocateRanks.
Status FindRank(const std::string& op, int32_t device, int64_t num_ranks, Counts device_table,
                RankLocation* location);

bool IsRecorded(cudaStream_t stream);

// Whether each call synchronizes and reports its own errors, instead of leaving them to a later
// call.
bool ChecksEachCall();

// The status of a call that has been enqueued. `message` is an error of an earlier call, or empty.
Status EndCall(const std::string& op, cudaStream_t stream, std::string message, Channel* channel);

}  // namespace cpd
