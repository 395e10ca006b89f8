// The kernels of dispatch and combine, of products and of the meetings around them, launched on a
// stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/call.h"
#include "kernels/meeting.h"
#include "kernels/prepare.h"
#include "kernels/product.h"

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

// ---- Launches the kernels around a product, and those in which ranks meet for an overlapped
// product. None synchronizes; `num_blocks` applies to one launch.

cudaError_t LaunchSum(const kernels::SumCall& call, int num_blocks, cudaStream_t stream);
cudaError_t LaunchColumns(const kernels::ColumnsCall& call, int num_blocks, cudaStream_t stream);
cudaError_t LaunchTranspose(const kernels::TransposeCall& call, int num_blocks,
                            cudaStream_t stream);
cudaError_t LaunchSwizzle(const kernels::SwizzleCall& call, int num_blocks, cudaStream_t stream);

// Copies rows without gaps, by a kernel.
cudaError_t LaunchCopy(char* to, const char* from, int64_t num_bytes, int num_blocks,
                       cudaStream_t stream);

cudaError_t LaunchBegin(const kernels::Meeting& meeting, cudaStream_t stream);
cudaError_t LaunchTell(const kernels::Meeting& meeting, int peer, int signal, cudaStream_t stream);
cudaError_t LaunchWaitFor(const kernels::Meeting& meeting, int peer, int signal,
                          cudaStream_t stream);
cudaError_t LaunchEnd(const kernels::MeetingResults& results, int num_blocks, cudaStream_t stream);

// Loads every kernel now, on the current device; see LoadKernels() in kernels.cu.
cudaError_t LoadProductKernels();

}  // namespace cpd
