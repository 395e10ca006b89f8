// Marks functions that compile for the host and, with a CUDA compiler, also for GPUs.
#pragma once

#ifdef __CUDACC__
#define CPD_HOST_DEVICE __host__ __device__
#else
#define CPD_HOST_DEVICE
#endif
