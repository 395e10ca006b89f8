// The kernels of dispatch and combine, launched on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/call.h"
#include "kernels/prepare.h"

namespace cpd {

// Launches a call: plan, move, exchange signals, take. `num_blocks` blocks move data, for all local
// ranks together. The host reads and stores nothing, so a recording of it can be replayed.
using CallLauncher = cudaError_t (*)(const kernels::Call& call, int num_blocks,
                                     cudaStream_t stream);
cudaError_t LaunchCall(const kernels::Call& call, int num_blocks, cudaStream_t stream);

// Copies the fields of a call whose kernels run on another stream.
cudaError_t LaunchHold(const kernels::HeldFields& held, cudaStream_t stream);

// Launches calls in which some ranks reach each other only over a network. The extension that
// starts NVSHMEM provides it, because NVSHMEM's device code belongs to the module that starts it.
void SetNetworkLauncher(CallLauncher launch);

// The name of its capsule: both extensions must come from one build.
constexpr const char* kLauncherName = "jax_cp_dispatch call launcher";

// The number of blocks that the current device runs at once, with each of them moving rows. Also
// loads the kernels, so call it before the first call on a device.
cudaError_t NumResidentBlocks(int* num_blocks);

// ---- Between GPUs of which some reach each other only over NVSHMEM.

// Call it before the first call, on the only device of this process, after NVSHMEM has started.
cudaError_t LoadNvshmemKernels(int device);

// Like LaunchCall, for a call with a network.
cudaError_t LaunchNvshmemCall(const kernels::Call& call, int num_blocks, cudaStream_t stream);

}  // namespace cpd
