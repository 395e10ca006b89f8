// Python bindings of the transport between processes. Python creates the sockets and segments.
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cpu/bindings.h"
#include "ffi/cpu/call_site.h"
#include "nanobind/stl/string.h"
#include "transport/shared_memory.h"

namespace nb = nanobind;

namespace cpd {
namespace {

[[noreturn]] void Refuse(int process, const std::string& why) {
  throw nb::value_error(
      ("initialize: the segment of process " + std::to_string(process) + " " + why).c_str());
}

// Maps only segments of at least the expected size: reading beyond their end would kill the
// process.
SharedSegment Map(int process, int fd, int64_t num_bytes, bool is_own) {
  struct stat status;
  if (fstat(fd, &status) != 0) Refuse(process, std::string("has no size: ") + std::strerror(errno));
  if (num_bytes <= 0 || status.st_size != num_bytes) {
    Refuse(process, "has " + std::to_string(status.st_size) + " bytes but " +
                        std::to_string(num_bytes) + " were announced.");
  }
  const int protection = is_own ? PROT_READ | PROT_WRITE : PROT_READ;
  void* base = mmap(nullptr, num_bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    Refuse(process, "of " + std::to_string(num_bytes) +
                        " bytes cannot be mapped: " + std::strerror(errno) +
                        ". Reduce JAX_CP_DISPATCH_SEGMENT_BYTES in all processes.");
  }
  madvise(base, num_bytes, MADV_DONTDUMP);
  return {process, fd, static_cast<char*>(base), num_bytes};
}

// `others` are of the class Neighbour in _ranks/processes/connect.py.
void Start(int process, int segment_fd, int64_t segment_bytes, const nb::sequence& others) {
  if (SharedMemoryTransport() != nullptr) throw nb::value_error("initialize: called twice.");
  std::vector<SharedSegment> segments;
  std::vector<Peer> peers;
  SharedSegment own = Map(process, segment_fd, segment_bytes, /*is_own=*/true);
  for (const nb::handle other : others) {
    const auto field = [&other](const char* name) { return nb::cast<int64_t>(other.attr(name)); };
    const auto file = [&field](const char* name) { return static_cast<int>(field(name)); };
    const auto number = static_cast<int>(field("process"));
    segments.push_back(Map(number, file("segment_fd"), field("segment_bytes"), /*is_own=*/false));
    peers.push_back({number, field("pid"), file("socket_fd"), file("pid_fd")});
  }
  StartSharedMemory(own, std::move(segments), std::move(peers));
}

}  // namespace

void BindProcesses(nb::module_& m) {
  using nb::arg;
  m.def("start_shared_memory", &Start, arg("process"), nb::kw_only(), arg("segment_fd"),
        arg("segment_bytes"), arg("others"),
        "Takes over the file descriptors; afterwards exchanges reach the ranks of the others.");
  m.def("end_programs", &EndPrograms, "Records that no program with calls is being compiled.");
}

}  // namespace cpd
