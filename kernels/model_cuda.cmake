# The GPU kernels of a model's forward pass.
carrel_cuda_library(carrel_model_kernels_cuda
  SOURCES
    argmax/argmax.cu argmax/argmax_ref.cc
    gather_rows/gather_rows.cu gather_rows/gather_rows_ref.cc
    half_convert/half_convert.cu
    linear/gemv.cu linear/linear_cuda.cc
    prefill_attention/prefill_attention.cu prefill_attention/prefill_attention_cuda_ref.cc
    prefill_attention/prefill_attention_mma.cu prefill_attention/prefill_attention_wgmma.cu
    query_drift/query_drift.cu
    rms_norm/rms_norm.cu rope/rope.cu silu_mul/silu_mul.cu
  DEPS carrel_cuda carrel_common CUDA::cublasLt)

carrel_gpu_test(model_kernels_gpu_test
  SOURCES
    argmax/argmax_gpu_test.cc
    gather_rows/gather_rows_gpu_test.cc
    half_convert/half_convert_gpu_test.cc
    linear/linear_gpu_test.cc
    prefill_attention/prefill_attention_gpu_test.cc
    query_drift/query_drift_gpu_test.cc query_drift/query_drift_ref.cc
    rms_norm/rms_norm_gpu_test.cc rms_norm/rms_norm_ref.cc
    rope/rope_gpu_test.cc rope/rope_ref.cc
    silu_mul/silu_mul_gpu_test.cc silu_mul/silu_mul_ref.cc
  DEPS carrel_model_kernels_cuda carrel_test_util)

foreach(op IN ITEMS linear prefill_attention)
  add_executable(${op}_gpu_bench EXCLUDE_FROM_ALL ${op}/${op}_gpu_bench.cc)
  target_link_libraries(${op}_gpu_bench PRIVATE carrel_model_kernels_cuda)
  add_dependencies(cuda_code ${op}_gpu_bench)
endforeach()
