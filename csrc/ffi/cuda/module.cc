// The Python module with the XLA FFI handlers and memory for GPUs. It loads without any CUDA
// library: the runtime is linked in, and the driver is opened on first use.

#include "ffi/module.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/attention_kernels.h"
#include "cuda/channels.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/overlap_queues.h"
#include "cuda/slab.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/nccl_window.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/pair.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"

namespace nb = nanobind;

namespace cpd {

// ---- The functions of the CUDA module about memory that several GPUs access: peers, and slabs.

namespace {

using nb::arg;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

// Calls a Python function, which returns the messages and an error.
Agree AgreeBy(nb::object function) {
  auto* held = new nb::object(std::move(function));  // never destroyed: Python may end first
  return [held](const std::string& name, const std::string& message,
                const std::vector<int64_t>& processes, std::chrono::milliseconds deadline,
                std::vector<std::string>* messages) -> Status {
    nb::gil_scoped_acquire lock;
    std::string error;
    try {
      std::tie(*messages, error) = nb::cast<std::pair<std::vector<std::string>, std::string>>(
          (*held)(name, message, processes, deadline.count()));
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    if (error.empty()) return Status::Ok();
    return {StatusCode::kDeadlineExceeded, std::move(error)};
  };
}

void BindPeers(nb::module_& m) {
  m.attr("PATTERN_BYTES") = kPatternBytes;
  m.def(
      "connect_peers",
      [](const std::vector<int>& devices) { return ConnectPeers(devices).message; }, arg("devices"),
      Unlocked(),
      "Lets GPUs of this process access each other's memory, and tries it; returns why not, or "
      "''.");
  m.def(
      "write_pattern",
      [](int device, uint64_t address, uint64_t seed) {
        Check(WritePattern(device, reinterpret_cast<char*>(address), seed));
        bool is_seen = false;
        Check(HasPattern(device, reinterpret_cast<char*>(address), seed, &is_seen));
        return is_seen;
      },
      arg("device"), arg("address"), arg("seed"), Unlocked(),
      "Writes a pattern by a kernel of the device; returns whether the device then reads it.");
  m.def(
      "has_pattern",
      [](int device, uint64_t address, uint64_t seed) {
        bool has_it = false;
        Check(HasPattern(device, reinterpret_cast<char*>(address), seed, &has_it));
        return has_it;
      },
      arg("device"), arg("address"), arg("seed"), Unlocked(),
      "Returns whether the device reads a pattern.");
}

void BindIpc(nb::module_& m) {
  m.def(
      "make_slab",
      [](int device, int64_t bytes) {
        char* memory = nullptr;
        std::string handle;
        Check(MakeIpcSlab(device, bytes, &memory, &handle));
        return nb::make_tuple(reinterpret_cast<uint64_t>(memory), handle);
      },
      arg("device"), arg("bytes"),
      "Allocates zeros; returns (address, handle for the other processes).");
  m.def(
      "open_slab",
      [](int device, const std::string& handle) {
        char* memory = nullptr;
        Check(OpenIpcSlab(device, handle, &memory));
        return reinterpret_cast<uint64_t>(memory);
      },
      arg("device"), arg("handle"), "Returns the address of another process's slab in this one.");
  m.def(
      "end_slab",
      [](int device, uint64_t address, bool is_own) {
        Check(EndIpcSlab(device, reinterpret_cast<char*>(address), is_own));
      },
      arg("device"), arg("address"), nb::kw_only(), arg("is_own"),
      "Undoes open_slab; or, after others have done so, make_slab.");
  m.def(
      "let_slab_grow",
      [](int device) {
        Slab::Get().SetGrowth({[device](int64_t bytes, char** memory, std::string* handle) {
                                 return MakeIpcSlab(device, bytes, memory, handle);
                               },
                               [device](const std::string& handle, char** memory) {
                                 return OpenIpcSlab(device, handle, memory);
                               }});
      },
      arg("device"),
      "Lets this process share more memory through CUDA IPC, when its slab is full.");
}

void BindMemory(nb::module_& m) {
  BindPeers(m);
  BindIpc(m);
  m.def(
      "set_slab",
      [](const std::vector<uint64_t>& bases, int64_t bytes, std::vector<int64_t> memory_groups,
         int64_t process) {
        std::vector<char*> pointers;
        for (const uint64_t base : bases) pointers.push_back(reinterpret_cast<char*>(base));
        Slab::Get().Set(std::move(pointers), bytes, std::move(memory_groups), process);
      },
      arg("bases"), arg("bytes"), arg("memory_groups"), arg("process"),
      "Sets the slabs of all processes; those of one group map each other's memory.");
  m.def(
      "set_agree", [](nb::object agree) { Slab::Get().SetAgree(AgreeBy(std::move(agree))); },
      arg("agree"),
      "Sets the function by which processes agree: (name, message, processes, milliseconds) -> "
      "(messages of the processes, error).");
  m.def(
      "set_network_launcher",
      [](nb::capsule launcher) {
        SetNetworkLauncher(reinterpret_cast<CallLauncher>(launcher.data(kLauncherName)));
      },
      arg("launcher"), "Sets the launcher of calls between groups, _nvshmem.launcher().");
}

// ---- What there is: GPUs, their memory, versions.

// (the number of GPUs, and why there are none).
nb::tuple DeviceCount() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaGetLastError();
  return nb::make_tuple(error == cudaSuccess ? count : 0,
                        std::string(error == cudaSuccess ? "" : cudaGetErrorString(error)));
}

// (bytes of shared memory that attention to such heads needs in a block, the least that a block of
// a GPU here may have; 0 without GPUs).
nb::tuple BlockMemory(int size, int value_size) {
  int count = 0, least = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();
  for (int device = 0; device < count; ++device) {
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    least = device == 0 ? most : std::min(least, most);
  }
  return nb::make_tuple(cpd::AttentionMemory({DataType::kBF16, size, value_size}), least);
}

// Why a GPU cannot run the package's kernels; empty: it can. Also loads those of exchanges.
std::string WhyNoKernels(int device) {
  const DeviceScope restore(device);
  int num_blocks = 0;
  return CudaStatus(NumResidentBlocks(&num_blocks), "loading the package's kernels on GPU ", device)
      .message;
}

nb::tuple Versions() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return nb::make_tuple(driver, runtime);
}

}  // namespace
}  // namespace cpd

NB_MODULE(_cuda, m) {
  using cpd::ChannelRegistry;
  m.doc() = "XLA FFI handlers on GPUs, and the memory in which their ranks meet.";
  cpd::BindTargets(
      m, {cpd::CudaAttentionTargets(), cpd::CudaDispatchTargets(), cpd::CudaGemmTargets()});
  cpd::BindSpans<cpd::GpuSpans>(m);
  m.def("device_count", &cpd::DeviceCount, "Returns (number of GPUs, why there are none).");
  m.def("attention_memory", &cpd::BlockMemory,
        "Returns the bytes of shared memory in a block (that attention needs, that GPUs have).");
  m.def("why_no_kernels", &cpd::WhyNoKernels, nb::arg("device"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Returns why a GPU cannot run the package's kernels; '': it can.");
  m.def("why_no_nccl", &cpd::WhyNoNccl, "Returns why windows of NCCL cannot be used, or ''.");
  m.def("versions", &cpd::Versions, "CUDA (of the driver, of the runtime): 13000 is 13.0.");
  m.def("set_process", [](int64_t process, std::vector<int64_t> ordinals) {
    ChannelRegistry::Get().SetProcess(process, std::move(ordinals));
  });
  m.def(
      "release_buffer", [](int64_t id) { ChannelRegistry::Get().Release(id); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("restore_buffer", [](int64_t id) { ChannelRegistry::Get().Restore(id); });
  m.def(
      "take_errors", [] { return ChannelRegistry::Get().TakeErrors(); },
      "Returns the errors that no call has reported yet.");
  m.def(
      "waiting_ranks",
      [] {
        std::vector<cpd::Channel::Waiting> found;
        {
          nb::gil_scoped_release release;
          found = ChannelRegistry::Get().FindWaiting();
        }
        nb::list all;
        for (const cpd::Channel::Waiting& one : found) {
          all.append(
              nb::make_tuple(one.channel, one.op, one.rank, one.call, one.missing, one.processes));
        }
        return all;
      },
      "Returns (channel, op, rank, call, missing ranks, their processes) of each rank that waits.");
  m.def("num_exchanges_beside_programs", &cpd::ExchangeStream::NumStarted,
        "Returns how many exchanges went on beside their program.");
  cpd::BindMemory(m);
}
