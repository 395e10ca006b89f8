# Refuses versions of nvcc with which the kernels would not compile, or would compute wrong results.
#
# ptxas of CUDA 12.8.0 to 12.9.0 miscompiles kernels of attention for Hopper; JAX refuses it for its
# own as well (jax/experimental/pallas/ops/gpu/attention_mgpu.py). CUDA 12.9.1 has nvcc 12.9.86.

if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "nvcc is ${CMAKE_CUDA_COMPILER_VERSION} but the kernels need 12.4 or newer. "
                      "Name another one: CUDACXX=/path/to/nvcc")
endif()
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8 AND
   CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9.86)
  message(FATAL_ERROR "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, of CUDA 12.8.0 to 12.9.0, whose "
                      "ptxas miscompiles kernels for Hopper. Use CUDA 12.4 to 12.6, or 12.9.1 or "
                      "newer: CUDACXX=/path/to/nvcc")
endif()
