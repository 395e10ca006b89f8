// Launches the kernels around a product, and those in which ranks meet for an overlapped product.
// None synchronizes; `num_blocks` applies to one launch.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/meeting.h"
#include "kernels/product.h"

namespace cpd {

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
