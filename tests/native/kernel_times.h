// Times each kernel of dispatch and combine by events, all ranks of one GPU in one launch, next to
// a copy of the same bytes: bandwidth without JAX. For test_kernels.cu.
#pragma once

#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels.h"

#define CUDA(call)                                                                           \
  do {                                                                                       \
    const cudaError_t error = call;                                                          \
    if (error != cudaSuccess) {                                                              \
      std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

namespace cpd::kernels {

constexpr int kTimedRanks = 8;
constexpr int kRepeats = 20;
constexpr int64_t kTimedBytes = int64_t{512} << 20;  // rows of all ranks

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) {
    CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
    CUDA(cudaMemset(data_, 0, bytes));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
};

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
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
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

// Every rank sends an equal share of its rows to every rank.
class TimedCall {
 public:
  TimedCall(bool is_dispatch, int64_t row_bytes, int num_blocks)
      : tokens_(kTimedBytes / kTimedRanks / row_bytes),
        fields_(4 * kTimedRanks * (4 * kTimedRanks + 1)),
        in_(kTimedBytes),
        out_(kTimedBytes) {
    constexpr int kRanks = kTimedRanks;
    const auto share = static_cast<int32_t>(tokens_ / kRanks);
    std::vector<int32_t> received, lengths, ranks, offsets;
    for (int r = 0; r < kRanks; ++r) {
      for (int s = 0; s < kRanks; ++s) {
        received.push_back(share);
        lengths.push_back(share);
        ranks.push_back(s);
        offsets.push_back(r * share);
      }
      received.push_back(kRanks * share);
    }
    call.is_dispatch = is_dispatch;
    call.num_ranks = call.num_local = kRanks;
    call.num_parts = call.num_arrays = 1;
    call.deadline_ns = 2'000'000'000;
    for (int r = 0; r < kRanks; ++r) call.pe[r] = -1;
    Part& part = call.parts[0];
    char* at = fields_.data();
    for (const auto& [field, values] :
         {std::pair{&part.num_recv, &received}, std::pair{&part.seq_len, &lengths},
          std::pair{&part.dst_rank, &ranks}, std::pair{&part.dst_offset, &offsets}}) {
      CUDA(cudaMemcpy(at, values->data(), 4 * values->size(), cudaMemcpyHostToDevice));
      *field = {at, IntType::kI32};
      at += 4 * values->size();
    }
    part.has_all_views = true;
    part.num_slots = kRanks;
    part.num_replicas = 1;
    part.num_tokens = part.capacity = tokens_;
    part.num_arrays = 1;
    // As in ffi/cuda/dispatch_call.cc.
    const int64_t bytes =
        std::clamp<int64_t>(tokens_ * row_bytes / (4 * num_blocks), 32 << 10, 128 << 10);
    part.rows_per_piece = std::max<int64_t>(1, bytes / row_bytes);
    const DataType type = is_dispatch ? DataType::kU8 : DataType::kF32;
    call.arrays[0].in = in_.data();
    call.arrays[0].out = out_.data();
    call.arrays[0].in_row_bytes = call.arrays[0].out_row_bytes = row_bytes;
    call.arrays[0].in_type = call.arrays[0].out_type = type;
    const int64_t channel_bytes = AlignUp(LayOutChannel(&call));
    channel_ = std::make_unique<DeviceMemory>(kRanks * channel_bytes);
    for (int r = 0; r < kRanks; ++r) call.symmetric[r] = channel_->data() + r * channel_bytes;
    local_ = std::make_unique<DeviceMemory>(LayOutLocal(&call));
    call.local = local_->data();
    CUDA(cudaHostAlloc(reinterpret_cast<void**>(&errors_), kRanks * sizeof(ErrorRecord),
                       cudaHostAllocMapped));
    std::memset(static_cast<void*>(errors_), 0, kRanks * sizeof(ErrorRecord));
    CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&call.errors), errors_, 0));
  }
  ~TimedCall() { cudaFreeHost(errors_); }
  TimedCall(const TimedCall&) = delete;
  TimedCall& operator=(const TimedCall&) = delete;

  bool IsFine() const {
    return std::all_of(errors_, errors_ + kTimedRanks,
                       [](const ErrorRecord& record) { return record.raised == 0; });
  }

  Call call{};

 private:
  const int64_t tokens_;
  const DeviceMemory fields_, in_, out_;
  std::unique_ptr<DeviceMemory> channel_, local_;
  ErrorRecord* errors_ = nullptr;
};

// One row of results: the whole call, and each of its kernels alone.
inline std::string TimeCall(bool is_dispatch, int64_t row_bytes, int num_blocks, float copy_ms,
                            cudaStream_t stream) {
  TimedCall timed(is_dispatch, row_bytes, num_blocks);
  const auto launch = [&] { CUDA(LaunchCall(timed.call, num_blocks, stream)); };
  launch();
  const float whole = Milliseconds(stream, launch);
  cudaGraph_t graph;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch();
  CUDA(cudaStreamEndCapture(stream, &graph));
  const std::vector<cudaKernelNodeParams> kernels = KernelsIn(graph);
  std::vector<std::vector<float>> times(kernels.size());
  std::vector<cudaEvent_t> events(kernels.size() + 1);
  for (cudaEvent_t& event : events) CUDA(cudaEventCreate(&event));
  for (int i = 0; i < kRepeats; ++i) {
    CUDA(cudaEventRecord(events[0], stream));
    for (size_t k = 0; k < kernels.size(); ++k) {
      const cudaKernelNodeParams& kernel = kernels[k];
      CUDA(cudaLaunchKernel(kernel.func, kernel.gridDim, kernel.blockDim, kernel.kernelParams,
                            kernel.sharedMemBytes, stream));
      CUDA(cudaEventRecord(events[k + 1], stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    for (size_t k = 0; k < kernels.size(); ++k) {
      times[k].push_back(0);
      CUDA(cudaEventElapsedTime(&times[k].back(), events[k], events[k + 1]));
    }
  }
  for (cudaEvent_t event : events) CUDA(cudaEventDestroy(event));
  char text[256];
  std::snprintf(text, sizeof text,
                "{\"what\": \"%s\", \"row_bytes\": %lld, \"fine\": %s, \"ms\": %.4f, "
                "\"copy_ms\": %.4f, \"of_copy\": %.3f, \"GB_per_s\": %.1f",
                is_dispatch ? "dispatch" : "combine", static_cast<long long>(row_bytes),
                timed.IsFine() ? "true" : "false", whole, copy_ms, copy_ms / whole,
                2e-6 * kTimedBytes / whole);
  std::string row = text;
  for (size_t k = 0; k < kernels.size(); ++k) {
    std::nth_element(times[k].begin(), times[k].begin() + kRepeats / 2, times[k].end());
    std::snprintf(text, sizeof text, ", \"%s_ms\": %.4f", NameOf(kernels[k].func).c_str(),
                  times[k][kRepeats / 2]);
    row += text;
  }
  CUDA(cudaGraphDestroy(graph));
  return row + "}";
}

// Prints a row per call and row size, and writes them to a file as JSON; nullptr: no file.
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
  for (const bool is_dispatch : {true, false}) {
    for (int64_t row_bytes = 256; row_bytes <= 16384; row_bytes *= 2) {
      rows.push_back(TimeCall(is_dispatch, row_bytes, num_blocks, copy_ms, stream));
      std::printf("%s\n", rows.back().c_str());
      std::fflush(stdout);
    }
  }
  if (std::FILE* file = path ? std::fopen(path, "w") : nullptr) {
    std::fprintf(file, "{\"title\": \"kernels, %d ranks on one GPU\", \"rows\": [\n", kTimedRanks);
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

}  // namespace cpd::kernels
