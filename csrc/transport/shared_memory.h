// The transport between processes of one host, each with one or several CPU devices.
#pragma once

#include <cstdint>
#include <memory>
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

// Messages name the ranks of `op` and their processes. Never destroyed: its threads wait on its
// members.
std::unique_ptr<Transport> MakeSharedMemoryTransport(SharedSegment own,
                                                     std::vector<SharedSegment> others,
                                                     std::vector<Peer> peers);

// The shared-memory transport of this process, or nullptr before `StartSharedMemory`.
Transport* SharedMemoryTransport();
void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers);

}  // namespace cpd
