// Recorded spans of ranks on GPUs: events on their streams, read when recording ends.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "transport/spans.h"

namespace cpd {

// All functions are thread-safe. While recording, each device synchronizes once to relate its time
// to the host's clock. Calls in a recorded command buffer have no spans.
class GpuSpans {
 public:
  static GpuSpans& Get();

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Start();  // clears earlier spans

  // Records an event on the stream. Returns the number that ends the span, or -1.
  // The times of `span` are set when recording ends.
  int Begin(RecordedSpan span, int device, cudaStream_t stream);
  void End(int number, cudaStream_t stream);

  // Waits for all recorded events. Times are on the host's monotonic clock.
  std::vector<RecordedSpan> Stop();

 private:
  struct Open {
    RecordedSpan span;
    int device;
    cudaEvent_t begin, end;
  };
  struct Clock {
    cudaEvent_t event;
    int64_t host_ns;
  };

  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<Open> spans_;
  std::map<int, Clock> clocks_;  // by device
};

}  // namespace cpd
