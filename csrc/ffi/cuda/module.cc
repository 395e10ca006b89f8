// The Python module with the XLA FFI handlers and memory for GPUs. It loads without any CUDA
// library: the runtime is linked in, and the driver is opened on first use.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/channels.h"
#include "cuda/exchange_stream.h"
#include "cuda/gpu_spans.h"
#include "cuda/ipc.h"
#include "cuda/kernels.h"
#include "ffi/cuda/targets.h"
#include "ffi/recorded_spans.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"

namespace nb = nanobind;

namespace cpd {
namespace {

// Target name -> stage name -> handler.
nb::dict Registrations() {
  nb::dict targets;
  for (const auto& of_room : {CudaAttentionTargets(), CudaDispatchTargets(), CudaGemmTargets()}) {
    for (const CudaTarget& target : of_room) {
      nb::dict stages;
      stages["initialize"] = nb::capsule(reinterpret_cast<void*>(target.initialize));
      stages["execute"] = nb::capsule(reinterpret_cast<void*>(target.execute));
      targets[target.name] = stages;
    }
  }
  return targets;
}

// (the number of GPUs, and why there are none).
nb::tuple DeviceCount() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaGetLastError();
  return nb::make_tuple(error == cudaSuccess ? count : 0,
                        std::string(error == cudaSuccess ? "" : cudaGetErrorString(error)));
}

nb::tuple Versions() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return nb::make_tuple(driver, runtime);
}

void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

void BindSlab(nb::module_& m) {
  using nb::arg;
  m.def(
      "make_slab",
      [](int device, int64_t bytes) {
        uint64_t address = 0;
        std::string handle;
        Check(MakeIpcSlab(device, bytes, &address, &handle));
        return nb::make_tuple(address, nb::bytes(handle.data(), handle.size()));
      },
      arg("device"), arg("bytes"),
      "Allocates zeros; returns (address, handle for the other processes).");
  m.def(
      "open_slab",
      [](int device, nb::bytes handle) {
        uint64_t address = 0;
        Check(OpenIpcSlab(device, std::string(handle.c_str(), handle.size()), &address));
        return address;
      },
      arg("device"), arg("handle"), "Returns the address of another process's slab in this one.");
  m.def(
      "set_slab",
      [](const std::vector<uint64_t>& bases, int64_t bytes, std::vector<int64_t> memory_groups) {
        std::vector<char*> pointers;
        for (const uint64_t base : bases) pointers.push_back(reinterpret_cast<char*>(base));
        Slab::Get().Set(std::move(pointers), bytes, std::move(memory_groups));
      },
      arg("bases"), arg("bytes"), arg("memory_groups"),
      "Sets the slabs of all processes; those of one group map each other's memory.");
  m.def(
      "set_network_launcher",
      [](nb::capsule launcher) {
        SetNetworkLauncher(reinterpret_cast<CallLauncher>(launcher.data(kLauncherName)));
      },
      arg("launcher"), "Sets the launcher of calls between groups, _nvshmem.launcher().");
}

}  // namespace
}  // namespace cpd

NB_MODULE(_cuda, m) {
  using cpd::ChannelRegistry;
  m.doc() = "XLA FFI handlers on GPUs, and the memory in which their ranks meet.";
  m.def("registrations", &cpd::Registrations, "Target name -> stage name -> handler capsule.");
  m.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers that this was built with.");
  m.def("device_count", &cpd::DeviceCount, "Returns (number of GPUs, why there are none).");
  m.def("versions", &cpd::Versions, "CUDA (of the driver, of the runtime): 13000 is 13.0.");
  m.def("set_process", [](int64_t process) { ChannelRegistry::Get().set_process(process); });
  m.def(
      "release_buffer", [](int64_t id) { ChannelRegistry::Get().Release(id); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("restore_buffer", [](int64_t id) { ChannelRegistry::Get().Restore(id); });
  m.def("start_spans", [] { cpd::GpuSpans::Get().Start(); });
  m.def("stop_spans", [] {
    std::vector<cpd::RecordedSpan> spans;
    {
      nanobind::gil_scoped_release release;  // it waits for the devices
      spans = cpd::GpuSpans::Get().Stop();
    }
    return cpd::ToPython(spans);
  });
  m.def(
      "take_errors", [] { return ChannelRegistry::Get().TakeErrors(); },
      "Returns the errors that no call has reported yet.");
  m.def("num_exchanges_beside_programs", &cpd::ExchangeStream::NumStarted,
        "Returns how many exchanges went on beside their program.");
  cpd::BindSlab(m);
}
