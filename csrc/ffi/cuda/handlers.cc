// The context of a custom call on a GPU: its device, its rank, and whether its stream is being
// recorded.
#include "ffi/cuda/handlers.h"

#include <cstdlib>
#include <cstring>

#include "cuda/status.h"

namespace cpd {

Status FindRank(const std::string& op, int32_t device, int64_t num_ranks, Counts device_table,
                RankLocation* location) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    return Status::Internal(op, ": cannot use GPU ", device, ": ", cudaGetErrorString(error));
  }
  auto& registry = ChannelRegistry::Get();
  Status status = LocateRanks(op, registry.NameOf(device), num_ranks, device_table, location);
  for (int64_t& entry : location->devices) entry = registry.ToOrdinal(entry);
  return status;
}

bool IsRecorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

bool ChecksEachCall() {
  static const bool checks = [] {
    const char* value = std::getenv("JAX_CP_DISPATCH_CHECK");
    return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
  }();
  return checks;
}

Status EndCall(const std::string& op, cudaStream_t stream, std::string message, Channel* channel) {
  if (ChecksEachCall()) {
    const Status status = CudaStatus(cudaStreamSynchronize(stream), op, ": the call");
    if (!status.ok()) return status;
    if (message.empty()) message = channel->TakeError(op);
  }
  return message.empty() ? Status::Ok() : Status::Invalid(message);
}

}  // namespace cpd
