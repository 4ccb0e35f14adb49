# Finds nvcc before enable_language(CUDA), in this order:
#   1. what the user said: CMAKE_CUDA_COMPILER, CUDACXX, CUDAToolkit_ROOT
#   2. the toolkit that NVIDIA's PyPI packages put beside the building Python (build isolation included)
#   3. CMake's own search (PATH, CUDA_PATH, /usr/local/cuda)
# The PyPI toolkit has lib, not lib64, and no libcudart.so link. Both gaps are closed with flags, so that
# nothing is written into site-packages.
function(prequal_cuda_from_wheel)
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    return()
  endif()

  if(CUDAToolkit_ROOT OR DEFINED ENV{CUDAToolkit_ROOT})
    set(root "${CUDAToolkit_ROOT}")
    if(NOT root)
      set(root "$ENV{CUDAToolkit_ROOT}")
    endif()
    if(NOT EXISTS "${root}/bin/nvcc")
      message(FATAL_ERROR "CUDAToolkit_ROOT: expected a folder with bin/nvcc, got '${root}'")
    endif()
    set(CMAKE_CUDA_COMPILER "${root}/bin/nvcc" CACHE FILEPATH "nvcc of the toolkit that CUDAToolkit_ROOT names")
    return()
  endif()

  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/find_cuda_wheel.py" nvcc
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed)
  if(failed OR NOT root)
    return()
  endif()

  message(STATUS "prequal: nvcc from the PyPI toolkit")
  set(CMAKE_CUDA_COMPILER "${root}/bin/nvcc" CACHE FILEPATH "nvcc of the PyPI toolkit")
  # nvcc.profile names lib64, which the wheel does not have
  set(CMAKE_CUDA_FLAGS_INIT "-L${root}/lib" PARENT_SCOPE)
  # find_package(CUDAToolkit) insists on a libcudart.so; nothing links it
  file(GLOB shared_cudart "${root}/lib/libcudart.so*")
  if(shared_cudart)
    list(GET shared_cudart 0 shared_cudart)
    set(CUDA_CUDART "${shared_cudart}" CACHE FILEPATH "shared cudart, only so that find_package succeeds")
  endif()
endfunction()

# cuobjdump, to read the finished module: from PyPI's packages, else where the toolkit or PATH has one.
function(prequal_find_cuobjdump)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/find_cuda_wheel.py" cuobjdump
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_program(PREQUAL_CUOBJDUMP cuobjdump HINTS "${root}/bin" "${CUDAToolkit_BIN_DIR}")
endfunction()
