// Times exchanges with few and many blocks, alone and beside a GEMM on another stream: how many
// blocks an exchange needs, and what each of the two loses. For test_kernels.cu.
//
// "dispatch" and "combine" are those of all ranks of the GPU in one pass. "push" and "unpack" are
// the kernels of one rank, through channels, as between GPUs; but the channels are in this GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpu_schedule/cublaslt.h"
#include "kernel_times.h"
#include "timed_call.h"

namespace cpd::kernels {

// A product of bfloat16 matrices by cuBLASLt.
class Gemm {
 public:
  static constexpr int64_t kSize = 8192;

  Gemm() : a_(kBytes), b_(kBytes), d_(kBytes), workspace_(kWorkspace) {
    FillLikeNumbers(a_.data());
    FillLikeNumbers(b_.data());
    product_.a = Matrix(a_);
    product_.b = Matrix(b_);
    product_.d = Matrix(d_);
    status_ = CublasLt::Get().Open("gemm");
    int device = 0;
    CUDA(cudaGetDevice(&device));
    if (status_.ok()) status_ = CublasLt::Get().Prepare("gemm", device);
    resources_ = {device, workspace_.data(), kWorkspace, nullptr};
  }

  const Status& status() const { return status_; }
  void Multiply(cudaStream_t stream) {
    resources_.stream = stream;
    if (status_.ok()) status_ = CublasLt::Get().Multiply("gemm", product_, resources_);
  }

 private:
  static constexpr int64_t kBytes = 2 * kSize * kSize;
  static constexpr int64_t kWorkspace = 32 << 20;

  static LtMatrix Matrix(const DeviceMemory& memory) {
    return {lt::kR16BF, kSize, kSize, kSize, memory.data(), nullptr};
  }

  // Numbers between -2 and 2: a product of zeros takes less power, hence less time.
  static void FillLikeNumbers(char* to) {
    constexpr int64_t kPart = 1 << 20;
    std::vector<uint16_t> part(kPart / 2);
    uint32_t state = 1;
    for (uint16_t& number : part) {
      state = state * 1664525 + 1013904223;
      number = (state >> 16 & 0x80ff) | (0x3e00 + (state >> 8 & 0x0100));
    }
    for (int64_t at = 0; at < kBytes; at += kPart) {
      CUDA(cudaMemcpy(to + at, part.data(), kPart, cudaMemcpyHostToDevice));
    }
  }

  const DeviceMemory a_, b_, d_, workspace_;
  LtProduct product_;
  LtResources resources_;
  Status status_;
};

// The time of an exchange and that of a GEMM, from a common begin.
struct Both {
  float exchange_ms, gemm_ms;
};

// Two streams; that of exchanges has the highest priority, as XLA's stream for collectives.
class Beside {
 public:
  Beside() {
    int least = 0, greatest = 0;
    CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA(cudaStreamCreateWithPriority(&exchanges_, cudaStreamNonBlocking, greatest));
    CUDA(cudaStreamCreateWithPriority(&gemms_, cudaStreamNonBlocking, least));
    for (cudaEvent_t* event : {&begin_, &exchanged_, &multiplied_}) CUDA(cudaEventCreate(event));
    gemm_.Multiply(gemms_);  // chooses the algorithm
    CUDA(cudaDeviceSynchronize());
    if (gemm_.status().ok()) gemm_ms_ = Milliseconds(gemms_, [&] { gemm_.Multiply(gemms_); });
  }

  const Status& status() const { return gemm_.status(); }
  float gemm_ms() const { return gemm_ms_; }  // alone
  cudaStream_t exchanges() const { return exchanges_; }

  // The medians over some runs, in each of which one of the two is launched first.
  Both Time(const std::function<void()>& exchange, bool exchange_is_first) {
    std::vector<float> exchanges, gemms;
    for (int i = 0; i < kTimes; ++i) {
      CUDA(cudaEventRecord(begin_, gemms_));
      CUDA(cudaStreamWaitEvent(exchanges_, begin_, 0));
      for (const bool is_first : {true, false}) {
        if (is_first == exchange_is_first) {
          exchange();
          CUDA(cudaEventRecord(exchanged_, exchanges_));
        } else {
          gemm_.Multiply(gemms_);
          CUDA(cudaEventRecord(multiplied_, gemms_));
        }
      }
      CUDA(cudaDeviceSynchronize());
      exchanges.push_back(0);
      gemms.push_back(0);
      CUDA(cudaEventElapsedTime(&exchanges.back(), begin_, exchanged_));
      CUDA(cudaEventElapsedTime(&gemms.back(), begin_, multiplied_));
    }
    return {MedianOf(exchanges), MedianOf(gemms)};
  }

 private:
  static constexpr int kTimes = 7;

  Gemm gemm_;
  cudaStream_t exchanges_, gemms_;
  cudaEvent_t begin_, exchanged_, multiplied_;
  float gemm_ms_ = 0;
};

inline std::string RowBeside(const char* what, const TimedCall& call, int num_blocks, int64_t bytes,
                             Beside* beside, const std::function<void()>& exchange) {
  exchange();
  CUDA(cudaDeviceSynchronize());
  const float alone = Milliseconds(beside->exchanges(), exchange);
  const Both first = beside->Time(exchange, true), second = beside->Time(exchange, false);
  const float serial = alone + beside->gemm_ms();
  const auto whole = [](const Both& both) { return std::max(both.exchange_ms, both.gemm_ms); };
  const float rate = 1e-6 * bytes / alone;  // of payload
  char text[640];
  std::snprintf(
      text, sizeof text,
      "{\"what\": \"%s\", \"blocks\": %d, \"alone_ms\": %.4f, "
      "\"payload_GB_per_s\": %.1f, \"GB_per_s_per_block\": %.2f, \"gemm_alone_ms\": %.4f, "
      "\"serial_ms\": %.4f, "
      "\"exchange_first\": {\"exchange_ms\": %.4f, \"gemm_ms\": %.4f, \"both_ms\": %.4f}, "
      "\"gemm_first\": {\"exchange_ms\": %.4f, \"gemm_ms\": %.4f, \"both_ms\": %.4f}, "
      "\"fine\": %s}",
      what, num_blocks, alone, rate, rate / num_blocks, beside->gemm_ms(), serial,
      first.exchange_ms, first.gemm_ms, whole(first), second.exchange_ms, second.gemm_ms,
      whole(second), call.IsFine() ? "true" : "false");
  return text;
}

// All ranks in one launch.
inline std::string WholeBeside(const Timed& timed, int num_blocks, Beside* beside) {
  const TimedCall call(timed, num_blocks);
  const char* what = timed.is_dispatch ? "dispatch" : "combine";
  return RowBeside(what, call, num_blocks, timed.num_bytes, beside,
                   [&] { CUDA(LaunchCall(call.calls[0], num_blocks, beside->exchanges())); });
}

// The kernels of the first rank that push, and that unpack: one call of all ranks comes first. No
// rank has signalled when the first one pushes, so its rows stay in the channel, and are unpacked
// again and again. When it pushes again, it takes them once.
inline std::vector<std::string> KernelsBeside(const Timed& timed, int num_blocks, Beside* beside) {
  TimedCall call(timed, num_blocks);
  std::vector<cudaGraph_t> graphs;
  const auto steps = StepsOf(call.calls, num_blocks, beside->exchanges(), &graphs);
  for (const auto& step : steps) {
    for (const cudaKernelNodeParams& kernel : step) Launch(kernel, beside->exchanges());
  }
  CUDA(cudaDeviceSynchronize());
  std::vector<std::string> rows;
  for (const auto& [name, what] : {std::pair{"Unpack", "unpack"}, std::pair{"PushTake", "push"}}) {
    for (const auto& step : steps) {
      if (NameOf(step[0].func) != name) continue;
      const int64_t bytes = timed.num_bytes / kTimedRanks;
      rows.push_back(RowBeside(what, call, num_blocks, bytes, beside,
                               [&] { Launch(step[0], beside->exchanges()); }));
    }
  }
  for (cudaGraph_t graph : graphs) CUDA(cudaGraphDestroy(graph));
  return rows;
}

// Prints a row for each, milliseconds from a common begin, and writes them to a file.
inline int TimeBesideGemm(int num_resident, const char* path) {
  constexpr int64_t kRowBytes = 8192;
  Beside beside;
  std::vector<std::string> rows;
  if (!beside.status().ok()) {
    std::printf("%s\n", beside.status().message.c_str());
    return 1;
  }
  for (const int num_blocks : {8, 16, 24, 32, 48, 64, 96, num_resident / 2, num_resident}) {
    Add(WholeBeside({true, 1, kRowBytes, kTimedBytes / 2}, num_blocks, &beside), &rows);
    for (std::string& row : KernelsBeside({true, 2, kRowBytes}, num_blocks, &beside)) {
      Add(std::move(row), &rows);
    }
    Add(WholeBeside({false, 1, kRowBytes, kTimedBytes / 2}, num_blocks, &beside), &rows);
  }
  const int status = Report("exchanges beside a GEMM of 8192", rows, path);
  return beside.status().ok() ? status : 1;
}

}  // namespace cpd::kernels
