// A device's streams for overlapped products, in addition to the program's, and their events.
#include "cuda/lanes.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <tuple>

#include "cuda/status.h"

namespace cpd {

Status Lanes::Find(const std::string& op, const LanesKey& key, bool is_recorded,
                   std::shared_ptr<Lanes>* lanes) {
  using Key = std::tuple<int, int, int64_t, int64_t, bool>;
  static auto& all_mutex = *new std::mutex;
  static auto& all = *new std::map<Key, std::shared_ptr<Lanes>>;
  const Key of_all{key.device, key.num_local, key.gemm_priority, key.comm_priority, is_recorded};
  std::lock_guard<std::mutex> lock(all_mutex);
  std::shared_ptr<Lanes>& found = all[of_all];
  if (found == nullptr) {
    auto made = std::make_shared<Lanes>();
    int lowest = 0, highest = 0;  // CUDA numbers priorities the other way around
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    for (int i = 0; i < 2 * key.num_local && error == cudaSuccess; ++i) {
      const int64_t wanted = i % 2 == 0 ? key.gemm_priority : key.comm_priority;
      const auto priority = static_cast<int>(std::clamp<int64_t>(lowest - wanted, highest, lowest));
      made->streams_.emplace_back();
      error = cudaStreamCreateWithPriority(&made->streams_.back(), cudaStreamNonBlocking, priority);
    }
    if (error != cudaSuccess) {
      all.erase(of_all);
      return CudaStatus(error, op, ": making streams");
    }
    found = std::move(made);
  }
  *lanes = found;
  return Status::Ok();
}

Status Lanes::WaitForRecording(const std::string& op, cudaStream_t stream) const {
  constexpr auto kPatience = std::chrono::seconds(10);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long own = 0, other = 0;  // NOLINT: CUDA's types
  cudaStreamGetCaptureInfo(stream, &status, &own);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  const auto is_busy = [&] {
    for (cudaStream_t lane : streams_) {
      if (cudaStreamGetCaptureInfo(lane, &status, &other) != cudaSuccess ||
          (status != cudaStreamCaptureStatusNone && other != own)) {
        return true;
      }
    }
    return false;
  };
  while (is_busy()) {
    if (std::chrono::steady_clock::now() > end) {
      return Status::Internal(
          op,
          ": another program has been recording on this device for 10 s. Start with "
          "XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing is recorded then).");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Status::Ok();
}

cudaError_t Lanes::event(int number, cudaEvent_t* event) {
  while (static_cast<int>(events_.size()) <= number) {
    cudaEvent_t made = nullptr;
    const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    if (error != cudaSuccess) return error;
    events_.push_back(made);
  }
  *event = events_[number];
  return cudaSuccess;
}

}  // namespace cpd
