// Recorded spans of ranks on GPUs: events on their streams, read when recording ends.
#include "cuda/gpu_spans.h"

#include <utility>

namespace cpd {

GpuSpans& GpuSpans::Get() {
  static auto* spans = new GpuSpans;
  return *spans;
}

void GpuSpans::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  spans_.clear();
  clocks_.clear();
  enabled_ = true;
}

int GpuSpans::Begin(RecordedSpan span, int device, cudaStream_t stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!enabled_) return -1;
  if (clocks_.count(device) == 0) {
    lock.unlock();  // the other spans remain
    Clock clock{};
    if (cudaEventCreate(&clock.event) != cudaSuccess) return -1;
    cudaEventRecord(clock.event, stream);
    cudaEventSynchronize(clock.event);
    clock.host_ns = SteadyNanoseconds();
    lock.lock();
    clocks_[device] = clock;
  }
  Open open{std::move(span), device, nullptr, nullptr};
  if (cudaEventCreate(&open.begin) != cudaSuccess || cudaEventCreate(&open.end) != cudaSuccess) {
    return -1;
  }
  cudaEventRecord(open.begin, stream);
  spans_.push_back(std::move(open));
  return static_cast<int>(spans_.size()) - 1;
}

void GpuSpans::End(int number, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number >= 0 && number < static_cast<int>(spans_.size())) {
    cudaEventRecord(spans_[number].end, stream);
  }
}

std::vector<RecordedSpan> GpuSpans::Stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  enabled_ = false;
  std::vector<RecordedSpan> read;
  for (Open& open : spans_) {
    const Clock& clock = clocks_[open.device];
    float start_ms = 0, duration_ms = 0;
    const bool is_read = cudaEventSynchronize(open.end) == cudaSuccess &&
                         cudaEventElapsedTime(&start_ms, clock.event, open.begin) == cudaSuccess &&
                         cudaEventElapsedTime(&duration_ms, open.begin, open.end) == cudaSuccess;
    cudaEventDestroy(open.begin);
    cudaEventDestroy(open.end);
    if (!is_read) continue;
    open.span.start_ns = clock.host_ns + static_cast<int64_t>(1e6 * start_ms);
    open.span.duration_ns = static_cast<int64_t>(1e6 * duration_ms);
    read.push_back(std::move(open.span));
  }
  for (auto& [device, clock] : clocks_) cudaEventDestroy(clock.event);
  cudaGetLastError();
  spans_.clear();
  clocks_.clear();
  return read;
}

}  // namespace cpd
