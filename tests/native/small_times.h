// Times small calls of dispatch and combine on one GPU, in one kernel and in several: alone, as the
// host launches them one after another, and as a recording replays them. With all ranks in one
// launch; and through channels, each rank on its stream, as between GPUs. For test_kernels.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "kernel_times.h"
#include "timed_call.h"

namespace cpd::kernels {

constexpr int kCallsInARow = 100;

// Microseconds of a call, if so many are recorded and replayed, by each rank on its own stream.
inline float ReplayMicroseconds(const TimedCall& timed, int num_blocks) {
  const size_t num_streams = timed.calls.size();
  std::vector<cudaStream_t> streams(num_streams);
  std::vector<cudaGraphExec_t> replays(num_streams);
  std::vector<cudaEvent_t> ends(num_streams);
  cudaEvent_t begin;
  CUDA(cudaEventCreate(&begin));
  for (size_t r = 0; r < num_streams; ++r) {
    CUDA(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&ends[r]));
    replays[r] = Record(streams[r], [&] {
      for (int i = 0; i < kCallsInARow; ++i) {
        CUDA(LaunchCall(timed.calls[r], num_blocks, streams[r]));
      }
    });
    CUDA(cudaGraphUpload(replays[r], streams[r]));
  }
  CUDA(cudaDeviceSynchronize());
  std::vector<float> times;
  for (int i = 0; i < 1 + kRepeats / 2; ++i) {
    CUDA(cudaEventRecord(begin, streams[0]));
    for (size_t r = 0; r < num_streams; ++r) {
      CUDA(cudaStreamWaitEvent(streams[r], begin, 0));
      CUDA(cudaGraphLaunch(replays[r], streams[r]));
      CUDA(cudaEventRecord(ends[r], streams[r]));
    }
    CUDA(cudaDeviceSynchronize());
    float last = 0;
    for (const cudaEvent_t end : ends) {
      float ms = 0;
      CUDA(cudaEventElapsedTime(&ms, begin, end));
      last = std::max(last, ms);
    }
    if (i > 0) times.push_back(1000 * last / kCallsInARow);
  }
  CUDA(cudaEventDestroy(begin));
  for (size_t r = 0; r < num_streams; ++r) {
    CUDA(cudaGraphExecDestroy(replays[r]));
    CUDA(cudaEventDestroy(ends[r]));
    CUDA(cudaStreamDestroy(streams[r]));
  }
  return MedianOf(times);
}

inline std::string TimeSmallCall(const Timed& what, int num_blocks, cudaStream_t stream) {
  const TimedCall timed(what, num_blocks);
  char text[512], of_launch[128] = "";
  if (what.num_passes == 1) {
    const auto calls = [&](int n) {
      for (int i = 0; i < n; ++i) CUDA(LaunchCall(timed.calls[0], num_blocks, stream));
    };
    calls(1);
    CUDA(cudaStreamSynchronize(stream));
    const float alone = 1000 * Milliseconds(stream, [&] { calls(1); });
    const float in_a_row = 1000 * Milliseconds(stream, [&] { calls(kCallsInARow); }) / kCallsInARow;
    std::snprintf(of_launch, sizeof of_launch, ", \"alone_us\": %.2f, \"in_a_row_us\": %.2f", alone,
                  in_a_row);
  }
  const float replayed = ReplayMicroseconds(timed, num_blocks);
  std::snprintf(
      text, sizeof text,
      "{\"what\": \"%s\", \"passes\": %d, \"row_bytes\": %lld, \"bytes_per_rank\": %lld, "
      "\"one_kernel\": %s, \"fine\": %s, \"replayed_us\": %.2f%s}",
      what.is_dispatch ? "dispatch" : "combine", what.num_passes,
      static_cast<long long>(what.row_bytes), static_cast<long long>(what.num_bytes / kTimedRanks),
      what.is_small ? "true" : "false", timed.IsFine() ? "true" : "false", replayed, of_launch);
  return text;
}

// Prints a row for each, several kernels next to one, and writes them to a file.
inline int TimeSmallCalls(int num_blocks, const char* path) {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<std::string> rows;
  for (const int num_passes : {1, 2}) {
    for (const bool is_dispatch : {true, false}) {
      // Rows of 16 bytes to 7 kB; every rank has one for each rank.
      for (const int64_t row_bytes : {16, 1024, 7168}) {
        for (const bool is_small : {false, true}) {
          const int64_t num_bytes = kTimedRanks * kTimedRanks * row_bytes;
          const Timed what{is_dispatch, num_passes, row_bytes, num_bytes, is_small};
          Add(TimeSmallCall(what, num_blocks, stream), &rows);
        }
      }
    }
  }
  return Report("small calls", rows, path);
}

}  // namespace cpd::kernels
