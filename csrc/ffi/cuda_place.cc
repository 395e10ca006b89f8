// Where a custom call on a GPU stands: on which device, as which rank, and whether it is recorded.
#include "ffi/cuda_place.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cuda/channels.h"

namespace cpd {

Status FindPlacement(const std::string& op, int32_t device, int64_t num_ranks, Counts places,
                     Placement* placement) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    return {StatusCode::kInternal,
            op + ": cannot use GPU " + std::to_string(device) + ": " + cudaGetErrorString(error)};
  }
  const int64_t here = ChannelRegistry::Get().process() << 16 | device;
  const auto count = static_cast<size_t>(num_ranks);
  if (places.size() == 1 && places[0] == -1) {
    *placement = {std::vector<int64_t>(count, here), 0, 0, true};
    return Status::Ok();
  }
  const auto at = std::find(places.begin(), places.end(), here);
  if (at == places.end()) {
    return Status::Invalid(op + ": the program was made for other devices than GPU " +
                           std::to_string(device) + " of process " + std::to_string(here >> 16) +
                           ". Compile it again.");
  }
  const size_t index = at - places.begin();
  const int64_t* first = places.begin() + index / count * count;
  *placement = {std::vector<int64_t>(first, first + count), static_cast<int>(index % count),
                static_cast<int>(index / count), false};
  return Status::Ok();
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

}  // namespace cpd
