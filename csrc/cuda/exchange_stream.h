// A device's stream for exchanges that run beside the program, and the pairs of calls around them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "gpu_schedule/exchange_pairs.h"
#include "transport/transport.h"

namespace cpd {

// One per device: its exchanges run one after another, in the same order on all ranks.
struct ExchangeStream {
  explicit ExchangeStream(StreamOrder* order) : pairs(order) {}

  // That of `device`, which must be current. Made on first use, and kept: call it first before a
  // program runs.
  static Status Find(const std::string& op, int device, ExchangeStream** found);

  // The exchanges of all devices that went on after their first call.
  static int64_t NumStarted();

  cudaStream_t stream = nullptr;
  ExchangePairs pairs;
};

}  // namespace cpd
