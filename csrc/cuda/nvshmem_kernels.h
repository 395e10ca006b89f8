// The kernels of dispatch and combine between GPUs of which some reach each other over NVSHMEM
// only.
#pragma once

#include "cuda/kernels.h"

namespace cpd {

// Before the first call, on the one device of this process. NVSHMEM has been started.
cudaError_t LoadNvshmemKernels(int device);

// As LaunchCall, for a call with a network.
cudaError_t LaunchNvshmemCall(const kernels::Call& call, int num_blocks, cudaStream_t stream);

}  // namespace cpd
