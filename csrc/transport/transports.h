// The transports between CPU devices: of one process, and of several processes of one host.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/links.h"
#include "transport/transport.h"

namespace cpd {

// Memory that `process` writes and this process reads. The own segment is the reverse.
struct SharedSegment {
  int process;
  int fd;  // of the own segment only
  char* base;
  int64_t num_bytes;
};

// The transport of this process. Never destroyed: detached threads wait on its condition variables,
// and destroying one of those hangs exit().
Transport& InProcessTransport();

// The same transport, once it reaches other processes; nullptr before `StartSharedMemory`.
Transport* SharedMemoryTransport();
void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers);

// Another one, as of another process. Never destroyed either.
Transport& NewTransport(SharedSegment own, std::vector<SharedSegment> others,
                        std::vector<Peer> peers);

}  // namespace cpd
