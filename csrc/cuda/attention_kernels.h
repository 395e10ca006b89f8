// Launches the kernels of attention to one range of keys per query.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attend.h"
#include "kernels/attention_gradients.h"

namespace cpd {

// Heads of 64 or 128; others are an invalid value.
cudaError_t LaunchAttend(const kernels::AttendCall& call, int head_size, cudaStream_t stream);
cudaError_t LaunchGradients(const kernels::GradientsCall& call, int head_size, cudaStream_t stream);

// Loads every kernel now, on the current device, and lets it use the memory that it needs.
cudaError_t LoadAttentionKernels();

}  // namespace cpd
