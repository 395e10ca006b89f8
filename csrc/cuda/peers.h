// Access of GPUs to each other's memory: enabled once for each pair, and tried.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// Lets GPUs of this process access each other's memory. Every pair is tried once, in both
// directions: some machines lose what is written. The message of a failure has no operation.
Status ConnectPeers(const std::vector<int>& devices);

// A pattern that a kernel of `device` writes, or finds, in memory that may belong to another GPU.
constexpr int64_t kPatternBytes = 1024;
Status WritePattern(int device, char* to, uint64_t seed);
Status HasPattern(int device, const char* at, uint64_t seed, bool* has_it);

}  // namespace cpd
