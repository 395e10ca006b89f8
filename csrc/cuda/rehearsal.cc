// Records the launches of a call once and discards them, before ranks wait for one another.
#include "cuda/rehearsal.h"

#include <map>
#include <mutex>
#include <set>

#include "cuda/product_kernels.h"
#include "cuda/status.h"

namespace cpd {
namespace {

// One mutex per device: loading kernels for one does not block another.
struct Rehearsed {
  std::mutex mutex;
  bool is_loaded = false;  // the library's handle, and this package's kernels
  std::set<std::vector<int64_t>> kernels;
};

Rehearsed& RehearsedOn(int device) {
  static auto& mutex = *new std::mutex;
  static auto& devices = *new std::map<int, Rehearsed>;
  std::lock_guard<std::mutex> lock(mutex);
  return devices[device];
}

Status Load(const std::string& op, int device, Rehearsed* rehearsed) {
  if (rehearsed->is_loaded) return Status::Ok();
  Status status = CublasLt::Get().Prepare(op, device);
  if (!status.ok()) return status;
  status = CudaStatus(LoadProductKernels(), op, ": loading kernels");
  rehearsed->is_loaded = status.ok();
  return status;
}

}  // namespace

Status Rehearsal::Run(const std::string& op, int device, const std::vector<int64_t>& kernels,
                      const std::function<Status(cudaStream_t)>& launch) {
  Rehearsed& rehearsed = RehearsedOn(device);
  std::lock_guard<std::mutex> lock(rehearsed.mutex);
  if (rehearsed.kernels.count(kernels) > 0) return Status::Ok();
  Status status = Load(op, device, &rehearsed);
  if (!status.ok()) return status;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t loaded = nullptr;
  arithmetic_->Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  if (stream_ == nullptr) return arithmetic_->status();
  arithmetic_->Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "recording");
  status = arithmetic_->status();
  if (status.ok()) {
    status = launch(stream_);
    arithmetic_->Check(cudaStreamEndCapture(stream_, &graph), "recording");
  }
  if (graph) arithmetic_->Check(cudaGraphInstantiate(&loaded, graph, 0), "loading kernels");
  if (loaded) cudaGraphExecDestroy(loaded);
  if (graph) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream_);
  if (status.ok()) status = arithmetic_->status();
  if (status.ok()) rehearsed.kernels.insert(kernels);
  return status;
}

}  // namespace cpd
