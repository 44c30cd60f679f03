#include <cublasLt.h>

#include <cstdio>

#include "bench/gpu/harness.h"

namespace carrel::gpu_bench {
namespace {

void CheckLt(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "gpu_bench: %s: cuBLAS status %d\n", call, static_cast<int>(status));
  std::exit(1);
}
#define CARREL_CHECK_LT(call) CheckLt((call), #call)

}  // namespace

double MeasureGemmFlops(Bench& bench) {
  constexpr int64_t kSize = 8192, kWorkspace = int64_t{64} << 20;
  void *a = nullptr, *b = nullptr, *c = nullptr, *workspace = nullptr;
  for (void** data : {&a, &b, &c}) CARREL_CHECK_CUDA(cudaMalloc(data, kSize * kSize * 2));
  CARREL_CHECK_CUDA(cudaMalloc(&workspace, kWorkspace));
  // Random: a product of zeros runs faster.
  CARREL_CHECK_CUDA(FillNormalBf16(static_cast<uint16_t*>(a), kSize * kSize, 1.0f, bench.rng()()));
  CARREL_CHECK_CUDA(FillNormalBf16(static_cast<uint16_t*>(b), kSize * kSize, 1.0f, bench.rng()()));
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t layout;
  cublasLtMatmulPreference_t preference;
  CARREL_CHECK_LT(cublasLtCreate(&handle));
  CARREL_CHECK_LT(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  CARREL_CHECK_LT(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                                 sizeof(transpose)));
  CARREL_CHECK_LT(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, kSize, kSize, kSize));
  CARREL_CHECK_LT(cublasLtMatmulPreferenceCreate(&preference));
  const size_t workspace_bytes = kWorkspace;
  CARREL_CHECK_LT(cublasLtMatmulPreferenceSetAttribute(preference,
                                                       CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                       &workspace_bytes, sizeof(workspace_bytes)));
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  CARREL_CHECK_LT(cublasLtMatmulAlgoGetHeuristic(handle, product, layout, layout, layout, layout,
                                                 preference, 1, &best, &found));
  if (found == 0) return 0;
  const float one = 1, zero = 0;
  const Timing t = bench.Time(2, [&](int64_t, cudaStream_t stream) {
    CARREL_CHECK_LT(cublasLtMatmul(handle, product, &one, a, layout, b, layout, &zero, c, layout, c,
                                   layout, &best.algo, workspace, kWorkspace, stream));
    return cudaSuccess;
  });
  cublasLtMatmulPreferenceDestroy(preference);
  cublasLtMatrixLayoutDestroy(layout);
  cublasLtMatmulDescDestroy(product);
  cublasLtDestroy(handle);
  for (void* data : {a, b, c, workspace}) CARREL_CHECK_CUDA(cudaFree(data));
  return 2.0 * kSize * kSize * kSize / (t.us * 1e-6);
}

}  // namespace carrel::gpu_bench
