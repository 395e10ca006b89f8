// A device's streams for overlapped products, in addition to the program's, and their events.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu_schedule/overlap_team.h"
#include "transport/transport.h"

namespace cpd {

// What calls that share lanes have in common. 0 is the lowest priority; larger values are more
// urgent.
struct LanesKey {
  int device, num_local;
  int64_t gemm_priority, comm_priority;
};

// The streams of each local rank. Calls on one device take turns to enqueue their steps.
class Lanes {
 public:
  // The streams of this device with these priorities. Created on first use, but not while a stream
  // is being recorded, and then kept. Calls that are being recorded have separate ones: from their
  // first step until XLA ends its recording, all that reaches these streams is recorded.
  static Status Find(const std::string& op, const LanesKey& key, bool is_recorded,
                     std::shared_ptr<Lanes>* lanes);

  // Waits on the host until no other recording than that of `stream` uses these streams; fails
  // after 10 s. Call with the mutex held.
  Status WaitForRecording(const std::string& op, cudaStream_t stream) const;

  cudaStream_t stream(int local, Lane lane) const {
    return streams_[2 * local + static_cast<int>(lane)];
  }
  const std::vector<cudaStream_t>& streams() const { return streams_; }

  // Event numbers start from 0 in each call.
  cudaError_t event(int number, cudaEvent_t* event);

  std::mutex mutex;  // held while a call enqueues its steps

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
};

}  // namespace cpd
