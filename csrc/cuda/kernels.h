// The kernels of dispatch and combine, launched on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/call.h"

namespace cpd {

// Launches all of a call: plan, move, meet, take. `num_blocks` move, on all local ranks together.
// Nothing is read or kept on the host, so a recording of it may be replayed.
using CallLauncher = cudaError_t (*)(const kernels::Call& call, int num_blocks,
                                     cudaStream_t stream);
cudaError_t LaunchCall(const kernels::Call& call, int num_blocks, cudaStream_t stream);

// Who launches calls between ranks of which some reach each other over a network only: the
// extension in which NVSHMEM runs, since its device code belongs to the module that starts it.
void SetNetworkLauncher(CallLauncher launch);

// Of the capsule in which it comes: both extensions have to be of one build.
constexpr const char* kLauncherName = "jax_cp_dispatch call launcher";

// As many blocks as the current device runs at once, when each of them moves rows. Also loads the
// kernels, so it comes before the first call on a device.
cudaError_t NumResidentBlocks(int* num_blocks);

}  // namespace cpd
