// The kernels of dispatch and combine between GPUs of which some reach each other over NVSHMEM
// only.
#pragma once

#include "cuda/kernels.h"

namespace cpd {

// As LaunchCall, for a call with a network. NVSHMEM has been started.
cudaError_t LaunchNvshmemCall(const device::Call& call, int num_blocks, cudaStream_t stream);

// On the current device, before the first call.
cudaError_t LoadNvshmemKernels();

}  // namespace cpd
