// The kernels of dispatch and combine, launched on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "device/call.h"

namespace cpd {

// Launches all of a call: plan, move, meet, take. `num_blocks` move, on all local ranks together.
// Nothing is read or kept on the host, so a recording of it may be replayed.
cudaError_t LaunchCall(const device::Call& call, int num_blocks, cudaStream_t stream);

// As many blocks as the current device runs at once, when each of them moves rows. Also loads the
// kernels, so it comes before the first call on a device.
cudaError_t NumResidentBlocks(int* num_blocks);

}  // namespace cpd
