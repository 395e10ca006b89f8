// Times each kernel of dispatch and combine by events, next to a copy of the same bytes: bandwidth
// without JAX. In one pass, with all ranks of the GPU in one launch; and in two, through channels,
// as between GPUs; by each copy path. For test_kernels.cu.
#pragma once

#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "timed_call.h"

namespace cpd::kernels {

constexpr int kRepeats = 20;

inline float MedianOf(std::vector<float> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// Milliseconds of what `run` enqueues, the median of some runs.
template <typename F>
float Milliseconds(cudaStream_t stream, F run) {
  cudaEvent_t begin, end;
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRepeats; ++i) {
    CUDA(cudaEventRecord(begin, stream));
    run();
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    times.push_back(0);
    CUDA(cudaEventElapsedTime(&times.back(), begin, end));
  }
  CUDA(cudaEventDestroy(begin));
  CUDA(cudaEventDestroy(end));
  return MedianOf(times);
}

// What `enqueue` puts on the stream, without running it.
template <typename F>
cudaGraph_t Capture(cudaStream_t stream, F enqueue) {
  cudaGraph_t graph;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  CUDA(cudaStreamEndCapture(stream, &graph));
  return graph;
}

// The same, for replays.
template <typename F>
cudaGraphExec_t Record(cudaStream_t stream, F enqueue) {
  cudaGraphExec_t replay;
  const cudaGraph_t graph = Capture(stream, enqueue);
  CUDA(cudaGraphInstantiate(&replay, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  return replay;
}

// "Push" of cpd::(anonymous namespace)::PushKernel<...>.
inline std::string NameOf(const void* kernel) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess || mangled == nullptr) return "?";
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
  std::string name = demangled ? demangled : mangled;
  std::free(demangled);
  const size_t end = name.find("Kernel");
  if (end == std::string::npos) return name;
  const size_t begin = name.rfind(':', end);
  return name.substr(begin == std::string::npos ? 0 : begin + 1, end - (begin + 1));
}

// The kernels of one call, as it launches them.
inline std::vector<cudaKernelNodeParams> KernelsIn(cudaGraph_t graph) {
  size_t count = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  CUDA(cudaGraphGetNodes(graph, nodes.data(), &count));
  std::vector<cudaKernelNodeParams> kernels;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    CUDA(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    kernels.emplace_back();
    CUDA(cudaGraphKernelNodeGetParams(node, &kernels.back()));
  }
  return kernels;
}

// The kernels of a call, by step; each step has one kernel of every launch.
inline std::vector<std::vector<cudaKernelNodeParams>> StepsOf(const std::vector<Call>& calls,
                                                              int num_blocks, cudaStream_t stream,
                                                              std::vector<cudaGraph_t>* graphs) {
  std::vector<std::vector<cudaKernelNodeParams>> steps;
  for (const Call& call : calls) {
    graphs->push_back(Capture(stream, [&] { CUDA(LaunchCall(call, num_blocks, stream)); }));
    const std::vector<cudaKernelNodeParams> kernels = KernelsIn(graphs->back());
    steps.resize(kernels.size());
    for (size_t k = 0; k < kernels.size(); ++k) steps[k].push_back(kernels[k]);
  }
  return steps;
}

inline void Launch(const cudaKernelNodeParams& kernel, cudaStream_t stream) {
  CUDA(cudaLaunchKernel(kernel.func, kernel.gridDim, kernel.blockDim, kernel.kernelParams,
                        kernel.sharedMemBytes, stream));
}

// One row of results: the whole call, and each of its kernels alone. Ranks with a call each take
// every step one after another, since a rank that waits needs what the others have sent.
inline std::string TimeCall(const Timed& what, int num_blocks, float copy_ms, cudaStream_t stream) {
  TimedCall timed(what, num_blocks);
  std::vector<cudaGraph_t> graphs;
  const auto steps = StepsOf(timed.calls, num_blocks, stream, &graphs);
  std::vector<std::vector<float>> times(steps.size());
  std::vector<cudaEvent_t> events(steps.size() + 1);
  for (cudaEvent_t& event : events) CUDA(cudaEventCreate(&event));
  for (int i = 0; i < 1 + kRepeats; ++i) {
    CUDA(cudaEventRecord(events[0], stream));
    for (size_t k = 0; k < steps.size(); ++k) {
      for (const cudaKernelNodeParams& kernel : steps[k]) Launch(kernel, stream);
      CUDA(cudaEventRecord(events[k + 1], stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    for (size_t k = 0; k < steps.size() && i > 0; ++k) {
      times[k].push_back(0);
      CUDA(cudaEventElapsedTime(&times[k].back(), events[k], events[k + 1]));
    }
  }
  for (cudaEvent_t event : events) CUDA(cudaEventDestroy(event));
  std::string of_kernels;
  float whole = 0;
  char text[512];
  for (size_t k = 0; k < steps.size(); ++k) {
    const float median = MedianOf(times[k]);
    whole += median;
    std::snprintf(text, sizeof text, ", \"%s_ms\": %.4f", NameOf(steps[k][0].func).c_str(), median);
    of_kernels += text;
  }
  if (what.num_passes == 1) {
    whole = Milliseconds(stream, [&] { CUDA(LaunchCall(timed.calls[0], num_blocks, stream)); });
  }
  for (cudaGraph_t graph : graphs) CUDA(cudaGraphDestroy(graph));
  std::snprintf(text, sizeof text,
                "{\"what\": \"%s\", \"passes\": %d, \"row_bytes\": %lld, "
                "\"fine\": %s, \"ms\": %.4f, \"copy_ms\": %.4f, \"of_copy\": %.3f, "
                "\"GB_per_s\": %.1f",
                what.is_dispatch ? "dispatch" : "combine", what.num_passes,
                static_cast<long long>(what.row_bytes), timed.IsFine() ? "true" : "false", whole,
                copy_ms, copy_ms / whole, 2e-6 * kTimedBytes / whole);
  return text + of_kernels + "}";
}

// Calls for a profiler, which replays each kernel several times: in one pass and through
// channels.
inline int ProfileKernels(int num_blocks) {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Timed all[] = {{true, 1, 1024}, {true, 2, 4096}, {false, 2, 4096}};
  bool is_fine = true;
  for (const Timed& what : all) {
    TimedCall timed(what, num_blocks);
    std::vector<cudaGraph_t> graphs;
    for (const auto& step : StepsOf(timed.calls, num_blocks, stream, &graphs)) {
      for (const cudaKernelNodeParams& kernel : step) Launch(kernel, stream);
    }
    CUDA(cudaStreamSynchronize(stream));
    for (cudaGraph_t graph : graphs) CUDA(cudaGraphDestroy(graph));
    std::printf("%s, %d passes, rows of %lld bytes: %s\n",
                what.is_dispatch ? "dispatch" : "combine", what.num_passes,
                static_cast<long long>(what.row_bytes), timed.IsFine() ? "profiled" : "failed");
    std::fflush(stdout);
    is_fine = is_fine && timed.IsFine();
  }
  return is_fine ? 0 : 1;
}

// Everything that is timed. A combine in one pass only sums.
inline std::vector<Timed> AllTimed() {
  std::vector<Timed> all;
  for (const bool is_dispatch : {true, false}) {
    for (const int num_passes : {1, 2}) {
      for (int64_t row_bytes = 256; row_bytes <= 16384; row_bytes *= 2) {
        all.push_back({is_dispatch, num_passes, row_bytes});
      }
    }
  }
  return all;
}

inline void Add(std::string row, std::vector<std::string>* rows) {
  std::printf("%s\n", row.c_str());
  std::fflush(stdout);
  rows->push_back(std::move(row));
}

// Writes rows to a file as JSON; nullptr: none. Returns the status of the program.
inline int Report(const char* title, const std::vector<std::string>& rows, const char* path) {
  if (std::FILE* file = path ? std::fopen(path, "w") : nullptr) {
    std::fprintf(file, "{\"title\": \"%s, %d ranks on one GPU\", \"rows\": [\n", title,
                 kTimedRanks);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::fprintf(file, "%s%s\n", rows[i].c_str(), i + 1 < rows.size() ? "," : "]}");
    }
    std::fclose(file);
  }
  for (const std::string& row : rows) {
    if (row.find("\"fine\": false") != std::string::npos) return 1;
  }
  return 0;
}

// Prints a row for each, and writes them to a file.
inline int TimeKernels(int num_blocks, const char* path) {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  float copy_ms = 0;
  {
    const DeviceMemory from(kTimedBytes), to(kTimedBytes);
    const auto copy = [&] {
      CUDA(cudaMemcpyAsync(to.data(), from.data(), kTimedBytes, cudaMemcpyDeviceToDevice, stream));
    };
    copy();
    copy_ms = Milliseconds(stream, copy);
  }
  std::vector<std::string> rows;
  for (const Timed& what : AllTimed()) {
    Add(TimeCall(what, num_blocks, copy_ms, stream), &rows);
  }
  return Report("kernels", rows, path);
}

}  // namespace cpd::kernels
