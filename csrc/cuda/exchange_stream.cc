// A device's stream for exchanges that run beside the program, and the pairs of calls around them.
#include "cuda/exchange_stream.h"

#include <map>
#include <memory>
#include <mutex>

#include "cuda/status.h"

namespace cpd {
namespace {

bool IsFine(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess;
}

class CudaOrder final : public StreamOrder {
 public:
  void* MakeEvent() override {
    cudaEvent_t event = nullptr;
    return IsFine(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) ? event : nullptr;
  }
  bool Record(void* event, void* stream) override {
    return IsFine(
        cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
  }
  bool Wait(void* stream, void* event) override {
    return IsFine(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
  }
  bool IsOver(void* event) override {
    return IsFine(cudaEventQuery(static_cast<cudaEvent_t>(event)));
  }
};

struct Streams {
  std::mutex mutex;
  CudaOrder order;
  std::map<int, std::unique_ptr<ExchangeStream>> by_device;
};

Streams& All() {
  static auto* all = new Streams;  // never destroyed: CUDA may have ended first
  return *all;
}

}  // namespace

Status ExchangeStream::Find(const std::string& op, int device, ExchangeStream** found) {
  Streams& all = All();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<ExchangeStream>& one = all.by_device[device];
  if (one == nullptr) {
    auto made = std::make_unique<ExchangeStream>(&all.order);
    int lowest = 0, highest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (error == cudaSuccess) {
      error = cudaStreamCreateWithPriority(&made->stream, cudaStreamNonBlocking, highest);
    }
    if (error != cudaSuccess) return CudaStatus(error, op, ": making a stream");
    one = std::move(made);
  }
  *found = one.get();
  return Status::Ok();
}

int64_t ExchangeStream::NumStarted() {
  Streams& all = All();
  std::lock_guard<std::mutex> lock(all.mutex);
  int64_t num = 0;
  for (auto& [device, one] : all.by_device) {
    if (one != nullptr) num += one->pairs.num_started();
  }
  return num;
}

}  // namespace cpd
