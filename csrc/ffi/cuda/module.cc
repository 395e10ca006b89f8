// The Python module with the XLA FFI handlers and memory for GPUs. It loads without any CUDA
// library: the runtime is linked in, and the driver is opened on first use.
#include "ffi/module.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention_kernels.h"
#include "cuda/channels.h"
#include "cuda/exchange_stream.h"
#include "cuda/gpu_spans.h"
#include "ffi/cuda/memory_bindings.h"
#include "ffi/cuda/targets.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"

namespace nb = nanobind;

namespace cpd {
namespace {

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
      m, "initialize",
      {cpd::CudaAttentionTargets(), cpd::CudaDispatchTargets(), cpd::CudaGemmTargets()});
  cpd::BindSpans<cpd::GpuSpans>(m);
  m.def("device_count", &cpd::DeviceCount, "Returns (number of GPUs, why there are none).");
  m.def("attention_memory", &cpd::BlockMemory,
        "Returns the bytes of shared memory in a block (that attention needs, that GPUs have).");
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
  m.def("num_exchanges_beside_programs", &cpd::ExchangeStream::NumStarted,
        "Returns how many exchanges went on beside their program.");
  cpd::BindMemory(m);
}
