// Launches the kernels of attention to one range of keys per query.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/attend.h"
#include "kernels/attention_gradients.h"

namespace cpd {

// The elements of queries, keys and values, and the sizes of their heads.
struct HeadType {
  DataType element;
  int size, value_size;

  bool operator==(const HeadType& other) const {
    return element == other.element && size == other.size && value_size == other.value_size;
  }
};

// Heads for which no kernel is compiled are an invalid value.
cudaError_t LaunchAttend(const kernels::AttendCall& call, const HeadType& heads,
                         cudaStream_t stream);
cudaError_t LaunchGradients(const kernels::GradientsCall& call, const HeadType& heads,
                            cudaStream_t stream);

// Loads every kernel now that the current device can run, and lets it use the memory it needs.
cudaError_t LoadAttentionKernels();

// Returns the bytes of shared memory that a block of these kernels needs at most; 0 without any.
size_t AttentionMemory(const HeadType& heads);

}  // namespace cpd
