// The Python module that starts NVSHMEM: one process per GPU, memory that all of them reach, and
// the kernels for GPUs that cannot map it.
//
// NVSHMEM aborts the process on failure, so everything that can be checked is checked first: the
// Python side (initialize) looks for a GPU and shares the id.
#include <cuda_runtime_api.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"

namespace nb = nanobind;

namespace cpd {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("initialize: ") + what +
                             " failed: " + cudaGetErrorString(error));
  }
}

void CheckDevice(int device) {
  int count = 0;
  Check(cudaGetDeviceCount(&count), "looking for a GPU");
  if (device < 0 || device >= count) {
    throw std::runtime_error("initialize: there is no GPU " + std::to_string(device) + " among " +
                             std::to_string(count));
  }
}

bool IsRunning() { return nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED; }

nb::bytes UniqueId() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&id) != 0) {
    throw std::runtime_error("initialize: NVSHMEM could not create a unique id");
  }
  return nb::bytes(reinterpret_cast<const char*>(&id), sizeof id);
}

// NVSHMEM silently ignores a second world, so this rejects it.
void Start(int rank, int num_ranks, const std::string& id_bytes, int device) {
  CheckDevice(device);
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (id_bytes.size() != sizeof id) {
    throw std::runtime_error("initialize: an NVSHMEM id has " + std::to_string(sizeof id) +
                             " bytes, got " + std::to_string(id_bytes.size()) +
                             ". All processes need the same version of NVSHMEM.");
  }
  std::memcpy(&id, id_bytes.data(), sizeof id);
  if (!IsRunning()) {
    Check(cudaSetDevice(device), "selecting the GPU");
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    if (nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &id, &attributes) != 0 ||
        nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes) != 0 || !IsRunning()) {
      throw std::runtime_error(
          "initialize: NVSHMEM did not start; set NVSHMEM_DEBUG=INFO for details");
    }
  }
  if (nvshmem_my_pe() != rank || nvshmem_n_pes() != num_ranks) {
    throw std::runtime_error("initialize: NVSHMEM already runs as process " +
                             std::to_string(nvshmem_my_pe()) + " of " +
                             std::to_string(nvshmem_n_pes()) + ", not as " + std::to_string(rank) +
                             " of " + std::to_string(num_ranks));
  }
}

// The slabs of all processes as mapped here; 0 if not mapped. All processes must call it, with the
// same size.
std::vector<uint64_t> MakeSlab(int64_t bytes) {
  if (!IsRunning()) throw std::runtime_error("initialize: NVSHMEM does not run");
  void* mine = nvshmem_calloc(1, bytes);
  if (mine == nullptr) {
    throw std::runtime_error("initialize: NVSHMEM has no " + std::to_string(bytes) +
                             " bytes; set NVSHMEM_SYMMETRIC_SIZE, or a smaller "
                             "JAX_CP_DISPATCH_SYMMETRIC_BYTES");
  }
  std::vector<uint64_t> slabs;
  for (int pe = 0; pe < nvshmem_n_pes(); ++pe) {
    slabs.push_back(reinterpret_cast<uint64_t>(nvshmem_ptr(mine, pe)));
  }
  return slabs;
}

nb::capsule Launcher(int device) {
  Check(LoadNvshmemKernels(device), "loading kernels");
  return nb::capsule(reinterpret_cast<void*>(&LaunchNvshmemCall), kLauncherName);
}

std::string Version() {
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

}  // namespace
}  // namespace cpd

NB_MODULE(_nvshmem, m) {
  using nb::arg;
  m.doc() = "NVSHMEM: one process per GPU, memory that all of them reach.";
  m.def("version", &cpd::Version);
  m.def("unique_id", &cpd::UniqueId,
        "Creates the id of a new world; all processes pass it to start.");
  m.def(
      "start",
      [](int rank, int num_ranks, nb::bytes id, int device) {
        const std::string bytes(id.c_str(), id.size());
        nb::gil_scoped_release release;
        cpd::Start(rank, num_ranks, bytes, device);
      },
      arg("rank"), arg("num_ranks"), arg("id"), arg("device"));
  m.def("make_slab", &cpd::MakeSlab, arg("bytes"), nb::call_guard<nb::gil_scoped_release>());
  m.def("launcher", &cpd::Launcher, arg("device"),
        "Returns the launcher of calls between GPUs that do not map each other's memory.");
}
