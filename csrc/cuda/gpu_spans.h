// What ranks on GPUs did and when: events on their streams, read when recording ends.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "transport/spans.h"

namespace cpd {

// All functions may be called from any thread. While somebody wants to see it, each device waits
// once, for the time on the host's clock; calls in a recorded command buffer are not seen.
class GpuSpans {
 public:
  static GpuSpans& Get();

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Start();  // forgets what was recorded before

  // An event now on the stream; the number to end the span with, or -1.
  int Begin(const std::string& op, int group, int rank, SpanKind kind, const std::string& name,
            int device, cudaStream_t stream);
  void End(int number, cudaStream_t stream);

  // Waits for what is recorded. Times are of the host's monotonic clock.
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
