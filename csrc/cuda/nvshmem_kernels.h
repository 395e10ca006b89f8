// The kernels of dispatch and combine between GPUs of which some reach each other only over
// NVSHMEM.
#pragma once

#include "cuda/kernels.h"

namespace cpd {

// Call it before the first call, on the only device of this process, after NVSHMEM has started.
cudaError_t LoadNvshmemKernels(int device);

// Like LaunchCall, for a call with a network.
cudaError_t LaunchNvshmemCall(const kernels::Call& call, int num_blocks, cudaStream_t stream);

}  // namespace cpd
