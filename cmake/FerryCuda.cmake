# FERRY_HAS_CUDA: whether the CUDA backend is built.  AUTO looks for a compiler, ON insists on one.
set(FERRY_HAS_CUDA OFF)
if(NOT FERRY_CUDA STREQUAL "OFF")
  find_program(FERRY_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(FERRY_NVCC)
    set(FERRY_HAS_CUDA ON)
  elseif(FERRY_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FERRY_CUDA=ON: no nvcc on the PATH or in /usr/local/cuda/bin.")
  endif()
endif()

if(FERRY_HAS_CUDA)
  if(FERRY_SANITIZE)
    message(FATAL_ERROR "FERRY_SANITIZE needs FERRY_CUDA=OFF: nvcc's host code is not instrumented.")
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${FERRY_NVCC}")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # the flags below name it
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(CCACHE_PROGRAM)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
  endif()
  # CMake 3.25 does not know C++20 for nvcc, which the sources' CMAKE_CXX_STANDARD asks it for as well.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  # sm_90a: wgmma and the bulk tensor copies are Hopper's own.  A product and a sum stay two roundings,
  # as on the CPU; FMA is asked for by name.
  set(FERRY_CUDA_FLAGS -gencode=arch=compute_90a,code=sm_90a -fmad=false --expt-relaxed-constexpr
    -Xcompiler=-Wall,-Wextra -Werror=all-warnings)
endif()
