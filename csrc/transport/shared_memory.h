// The transport between processes of one host, each with one or several CPU devices.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/links.h"
#include "transport/transport.h"

namespace cpd {

// Memory that this process reads and `process` writes, or for the own process the other way round.
struct SharedSegment {
  int process;
  int fd;  // of the own one
  char* base;
  int64_t num_bytes;
};

// `op` in messages tells ranks; processes are named beside them. Never destroyed: threads of its
// own wait on what it holds.
std::unique_ptr<Transport> MakeSharedMemoryTransport(SharedSegment own,
                                                     std::vector<SharedSegment> others,
                                                     std::vector<Peer> peers);

// The one transport of this process, once `StartSharedMemory` has made it; before: none.
Transport* SharedMemoryTransport();
void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers);

// The number of this process among those that were started; without: 0.
int ThisProcess();

}  // namespace cpd
