# The GPU backend, if CARREL_CUDA is on. Without it nothing of CUDA is looked for.
#   carrel_cuda_library(NAME SOURCES... DEPS...)  device code: .cu files, and .cc files beside them
#   carrel_gpu_test(NAME SOURCES... DEPS...)      a test program that needs a GPU; ctest label gpu
#   cuda_code                                     target: everything that these two made
option(CARREL_CUDA "build the CUDA backend" OFF)
add_custom_target(cuda_code)
if(NOT CARREL_CUDA)
  return()
endif()

# One architecture while developing, preset gpu; those of preset gpu-release in releases.
set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures to compile for")
# Plain 90 has no wgmma, which attention runs on there.
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a")
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90-" "90a-")
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # programs need the driver alone
enable_language(CUDA)
# CMake 3.25 does not know that nvcc has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -lineinfo")

# Optional. cmake -DFaissGpu_ROOT=FOLDER
list(APPEND CMAKE_MODULE_PATH ${CMAKE_SOURCE_DIR}/cmake)
find_package(FaissGpu)
if(FaissGpu_FOUND)
  set_target_properties(faiss PROPERTIES
    IMPORTED_LOCATION ${FaissGpu_LIBRARY}
    INTERFACE_LINK_LIBRARIES "PkgConfig::openblas;CUDA::cublas;CUDA::cudart_static"
    INTERFACE_INCLUDE_DIRECTORIES ${FaissGpu_INCLUDE_DIR})
endif()

add_library(carrel_cuda_flags INTERFACE)
target_include_directories(carrel_cuda_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(carrel_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-missing-field-initializers>
  $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Wall,-Werror>)
target_link_libraries(carrel_cuda_flags INTERFACE CUDA::cudart_static)

function(carrel_cuda_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC carrel_cuda_flags ${arg_DEPS})
  add_dependencies(cuda_code ${name})
endfunction()

# One ctest entry per program: a process that uses the GPU takes longer to start than most tests do.
# These programs run on other machines too (tools/gpu/pack): no path of this one is compiled in but that of
# SourceFolder() (common/test_folders.h), which the environment can change.
function(carrel_gpu_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;DEPS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE carrel_cuda_flags ${arg_DEPS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS gpu RUN_SERIAL TRUE TIMEOUT ${arg_TIMEOUT})
  add_dependencies(cuda_code ${name})
endfunction()
