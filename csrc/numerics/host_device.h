// Marks functions that run on the host and, where a CUDA compiler reads them, on a GPU too.
#pragma once

#ifdef __CUDACC__
#define CPD_HOST_DEVICE __host__ __device__
#else
#define CPD_HOST_DEVICE
#endif
