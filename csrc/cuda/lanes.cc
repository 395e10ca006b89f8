// A device's streams for overlapped products, in addition to the program's, and their events.
#include "cuda/lanes.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace cpd {

Status Lanes::Find(const std::string& op, int device, int num_local, int64_t gemm_priority,
                   int64_t comm_priority, std::shared_ptr<Lanes>* lanes) {
  using Key = std::tuple<int, int, int64_t, int64_t>;
  static auto& all_mutex = *new std::mutex;
  static auto& all = *new std::map<Key, std::shared_ptr<Lanes>>;
  std::lock_guard<std::mutex> lock(all_mutex);
  std::shared_ptr<Lanes>& found = all[{device, num_local, gemm_priority, comm_priority}];
  if (found == nullptr) {
    auto made = std::make_shared<Lanes>();
    int lowest = 0, highest = 0;  // CUDA numbers priorities the other way around
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    for (int i = 0; i < 2 * num_local && error == cudaSuccess; ++i) {
      const int64_t wanted = i % 2 == 0 ? gemm_priority : comm_priority;
      const auto priority = static_cast<int>(std::clamp<int64_t>(lowest - wanted, highest, lowest));
      made->streams_.emplace_back();
      error = cudaStreamCreateWithPriority(&made->streams_.back(), cudaStreamNonBlocking, priority);
    }
    if (error != cudaSuccess) {
      cudaGetLastError();
      all.erase({device, num_local, gemm_priority, comm_priority});
      return {StatusCode::kInternal, op + ": making streams failed: " + cudaGetErrorString(error)};
    }
    found = std::move(made);
  }
  *lanes = found;
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
