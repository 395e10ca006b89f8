// Several "processes" of a job within one process, connected by sockets and segments as real ones
// are.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ranks.h"
#include "transport/transports.h"

namespace cpd {

// Several "processes". Never destroyed, like their transports.
struct Job {
  Job(int num_processes, int64_t segment_bytes = int64_t{8} << 30) {
    std::vector<SharedSegment> own, seen;
    for (int p = 0; p < num_processes; ++p) {
      const int fd = memfd_create("test", MFD_CLOEXEC);
      CHECK(fd >= 0 && ftruncate(fd, segment_bytes) == 0);
      const auto map = [&](int protection) {
        void* base = mmap(nullptr, segment_bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
        CHECK(base != MAP_FAILED);
        return static_cast<char*>(base);
      };
      segments.push_back(fd);
      own.push_back({p, fd, map(PROT_READ | PROT_WRITE), segment_bytes});
      seen.push_back({p, fd, map(PROT_READ), segment_bytes});
    }
    sockets.assign(num_processes, std::vector<int>(num_processes, -1));
    for (int p = 0; p < num_processes; ++p) {
      for (int q = 0; q < p; ++q) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
        sockets[p][q] = pair[0];
        sockets[q][p] = pair[1];
      }
    }
    for (int p = 0; p < num_processes; ++p) {
      std::vector<SharedSegment> others;
      std::vector<Peer> peers;
      for (int q = 0; q < num_processes; ++q) {
        if (q == p) continue;
        others.push_back(seen[q]);
        peers.push_back({q, getpid(), sockets[p][q], -1});
      }
      transports.push_back(&NewTransport(own[p], others, peers));
    }
  }

  // As if the process had been killed: its links end, whatever it is doing.
  void Kill(int process) {
    for (const int socket : sockets[process]) {
      if (socket >= 0) shutdown(socket, SHUT_RDWR);
    }
  }

  std::vector<Transport*> transports;
  std::vector<std::vector<int>> sockets;
  std::vector<int> segments;  // file descriptors
};

// Always reachable, for leak checkers.
template <typename... Arguments>
Job& NewJob(Arguments... arguments) {
  static auto& jobs = *new std::vector<std::unique_ptr<Job>>;
  return *jobs.emplace_back(std::make_unique<Job>(arguments...));
}

inline std::future<Status> JoinIn(Job& job, const Exchange& exchange, int rank,
                                  std::unique_ptr<Contribution> contribution) {
  auto [completion, status] = Promised();
  job.transports[(*exchange.processes)[rank]]->Join(exchange, rank, std::move(contribution),
                                                    std::move(completion), 0, {});
  return std::move(status);
}

}  // namespace cpd
