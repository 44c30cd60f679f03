# Faiss built with its GPU half (tools/gpu/build-faiss FOLDER): FaissGpu_FOUND, FaissGpu_LIBRARY and
# FaissGpu_INCLUDE_DIR. Looked for in FaissGpu_ROOT. It is the same version as Debian's, and takes
# its place in the whole program.
find_path(FaissGpu_INCLUDE_DIR faiss/gpu/GpuDistance.h)
find_library(FaissGpu_LIBRARY faiss_avx2)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(FaissGpu REQUIRED_VARS FaissGpu_LIBRARY FaissGpu_INCLUDE_DIR)
