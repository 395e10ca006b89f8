# The CUDA extensions: _cuda (kernels, peer memory) and, where NVSHMEM is found, _nvshmem.
#
# No GPU and no driver is needed to build them, and _cuda loads without any CUDA library.

# The tensor cores of Hopper multiply matrices of warpgroups in code for sm_90a alone.
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90-real$" "90a-real")
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a-real;90-virtual")

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit 12.4 REQUIRED)

# CUDA 13 has libcu++ in a separate folder, which only nvcc finds by itself.
set(CPD_CUDA_INCLUDE_DIRS ${CUDAToolkit_INCLUDE_DIRS})
foreach(dir IN LISTS CUDAToolkit_INCLUDE_DIRS)
  if(EXISTS "${dir}/cccl/cuda/std/tuple")
    list(APPEND CPD_CUDA_INCLUDE_DIRS "${dir}/cccl")
  endif()
endforeach()

# Device code in a separate library, so nanobind's flags never reach nvcc. ptxas tells
# registers and spills, which csrc/cuda/check_kernels.py reads.
add_library(cpd_cuda STATIC
  csrc/cuda/attention_kernels.cu
  csrc/cuda/errors.cc
  csrc/cuda/kernels.cu
  csrc/cuda/memory.cc
  csrc/cuda/product_kernels.cu)
target_include_directories(cpd_cuda SYSTEM PUBLIC ${CPD_CUDA_INCLUDE_DIRS})
target_link_libraries(cpd_cuda PUBLIC cpd_core CUDA::cudart_static)
target_compile_options(cpd_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)

nanobind_add_module(_cuda STABLE_ABI NB_STATIC
  csrc/ffi/common.cc
  csrc/ffi/cuda/attention.cc
  csrc/ffi/cuda/dispatch.cc
  csrc/ffi/cuda/dispatch_call.cc
  csrc/ffi/cuda/gemm.cc
  csrc/ffi/cuda/gemm_call.cc
  csrc/ffi/cuda/module.cc
  csrc/ffi/cuda/nccl_window.cc
  csrc/ffi/dispatch_call.cc
  csrc/ffi/gemm_call.cc)
target_include_directories(_cuda SYSTEM PRIVATE "${JAXLIB_INCLUDE_DIR}")
target_link_libraries(_cuda PRIVATE cpd_cuda)
target_compile_options(_cuda PRIVATE -Wall -Wextra)
install(TARGETS _cuda LIBRARY DESTINATION jax_cp_dispatch)

# NVSHMEM comes as a wheel, nvidia-nvshmem-cu13, which has the versioned library name only.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else []), sep=';')"
  OUTPUT_VARIABLE CPD_NVIDIA_DIRS OUTPUT_STRIP_TRAILING_WHITESPACE)
list(TRANSFORM CPD_NVIDIA_DIRS APPEND "/nvshmem")
find_path(NVSHMEM_INCLUDE_DIR nvshmem.h HINTS ENV NVSHMEM_HOME ${CPD_NVIDIA_DIRS}
          PATH_SUFFIXES include)
find_library(NVSHMEM_DEVICE_LIBRARY libnvshmem_device.a
             HINTS ENV NVSHMEM_HOME ${CPD_NVIDIA_DIRS} PATH_SUFFIXES lib)
find_file(NVSHMEM_HOST_LIBRARY NAMES libnvshmem_host.so.3 HINTS ENV NVSHMEM_HOME ${CPD_NVIDIA_DIRS}
          PATH_SUFFIXES lib)
if(NVSHMEM_INCLUDE_DIR AND NVSHMEM_DEVICE_LIBRARY AND NVSHMEM_HOST_LIBRARY)
  # NVSHMEM's device code keeps its state in the module that starts it, so it is linked here, with
  # our kernels that call it. The linker tells registers and stacks of both together.
  add_library(cpd_nvshmem STATIC csrc/cuda/nvshmem_kernels.cu)
  set_target_properties(cpd_nvshmem PROPERTIES CUDA_SEPARABLE_COMPILATION ON
                        POSITION_INDEPENDENT_CODE ON CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
  target_include_directories(cpd_nvshmem SYSTEM PUBLIC "${NVSHMEM_INCLUDE_DIR}"
                             ${CPD_CUDA_INCLUDE_DIRS})
  target_link_libraries(cpd_nvshmem PRIVATE cpd_core)
  target_compile_options(cpd_nvshmem PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  nanobind_add_module(_nvshmem STABLE_ABI NB_STATIC csrc/ffi/cuda/nvshmem.cc)
  target_link_libraries(_nvshmem PRIVATE cpd_nvshmem cpd_core "${NVSHMEM_DEVICE_LIBRARY}"
                        "${NVSHMEM_HOST_LIBRARY}" CUDA::cudart_static)
  target_link_options(_nvshmem PRIVATE $<DEVICE_LINK:-Xnvlink=-v>)
  target_compile_options(_nvshmem PRIVATE -Wall -Wextra)
  set_target_properties(_nvshmem PROPERTIES
    CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON LINKER_LANGUAGE CUDA
    INSTALL_RPATH "$ORIGIN/../nvidia/nvshmem/lib")
  install(TARGETS _nvshmem LIBRARY DESTINATION jax_cp_dispatch)
  message(STATUS "NVSHMEM: ${NVSHMEM_INCLUDE_DIR}")
else()
  message(STATUS "NVSHMEM was not found (wheel nvidia-nvshmem-cu13, or NVSHMEM_HOME): no _nvshmem")
endif()
