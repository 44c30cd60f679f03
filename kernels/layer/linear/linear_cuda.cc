#include "kernels/layer/linear/linear_cuda.h"

#include <cublasLt.h>

#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace carrel::kernels {
namespace {

// cuBLASLt's descriptors, owned.
template <typename T, cublasStatus_t (*kDestroy)(T)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (value_ != nullptr) kDestroy(value_);
  }
  Owned(Owned&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  T get() const { return value_; }
  T* address() { return &value_; }

 private:
  T value_ = nullptr;
};
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

struct Plan {
  Operation operation;
  Layout w, x, y;
  cublasLtMatmulAlgo_t algorithm;
};

// cuBLASLt counts columns first: y^T [out, n] = w^T^T [out, in] x^T [in, n].
cublasStatus_t MakePlan(cublasLtHandle_t handle, const LinearCudaParams& p, Plan& plan) {
  const cudaDataType_t y_type = CUDA_R_32F;
  const cudaDataType_t half = p.type == HalfType::kBf16 ? CUDA_R_16BF : CUDA_R_16F;
  const auto in = static_cast<uint64_t>(p.in), out = static_cast<uint64_t>(p.out),
             n = static_cast<uint64_t>(p.n);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  Preference preference;
  const size_t workspace = LinearCuda::kWorkspaceBytes;
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  cublasStatus_t status;
#define RETURN_IF_CUBLAS_ERROR(call) \
  if ((status = (call)) != CUBLAS_STATUS_SUCCESS) return status
  RETURN_IF_CUBLAS_ERROR(
      cublasLtMatmulDescCreate(plan.operation.address(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
      plan.operation.get(), CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
  if (p.bias != nullptr) {
    RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
        plan.operation.get(), CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)));
    RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
        plan.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &y_type, sizeof(y_type)));
    RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
        plan.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof(p.bias)));
  }
  RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(plan.w.address(), half, in, out, p.in));
  RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(plan.x.address(), half, in, n, p.in));
  RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(plan.y.address(), y_type, out, n, p.out));
  RETURN_IF_CUBLAS_ERROR(cublasLtMatmulPreferenceCreate(preference.address()));
  RETURN_IF_CUBLAS_ERROR(cublasLtMatmulPreferenceSetAttribute(
      preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
  RETURN_IF_CUBLAS_ERROR(cublasLtMatmulAlgoGetHeuristic(handle, plan.operation.get(), plan.w.get(),
                                                        plan.x.get(), plan.y.get(), plan.y.get(),
                                                        preference.get(), 1, &result, &found));
#undef RETURN_IF_CUBLAS_ERROR
  if (found == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  plan.algorithm = result.algo;
  return CUBLAS_STATUS_SUCCESS;
}

class CublasLinear final : public LinearCuda {
 public:
  explicit CublasLinear(void* workspace) : workspace_(workspace) {}
  ~CublasLinear() override {
    if (handle_ != nullptr) cublasLtDestroy(handle_);
  }
  cublasLtHandle_t* handle() { return &handle_; }

  cudaError_t Gemm(const LinearCudaParams& p, cudaStream_t stream) override {
    if (p.n < 0 || p.in < 8 || p.in % 8 != 0 || p.out < 8 || p.out % 8 != 0) {
      return cudaErrorInvalidValue;
    }
    if (p.n == 0) return cudaSuccess;
    const Key key(p.n, p.in, p.out, p.accumulate, p.bias != nullptr, p.type);
    auto at = plans_.find(key);
    if (at == plans_.end()) {
      // Prompts come in every length; what is forgotten is found again.
      if (plans_.size() >= kMaxPlans) plans_.clear();
      Plan plan;
      if (MakePlan(handle_, p, plan) != CUBLAS_STATUS_SUCCESS) return cudaErrorUnknown;
      at = plans_.emplace(key, std::move(plan)).first;
    }
    const Plan& plan = at->second;
    if (p.bias != nullptr &&
        cublasLtMatmulDescSetAttribute(plan.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                       &p.bias, sizeof(p.bias)) != CUBLAS_STATUS_SUCCESS) {
      return cudaErrorUnknown;
    }
    const float one = 1, beta = p.accumulate ? 1.0f : 0.0f;
    const cublasStatus_t status = cublasLtMatmul(
        handle_, plan.operation.get(), &one, p.w, plan.w.get(), p.x, plan.x.get(), &beta, p.y,
        plan.y.get(), p.y, plan.y.get(), &plan.algorithm, workspace_, kWorkspaceBytes, stream);
    return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, HalfType>;
  static constexpr size_t kMaxPlans = 4096;

  cublasLtHandle_t handle_ = nullptr;
  void* const workspace_;
  std::map<Key, Plan> plans_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LinearCuda>> LinearCuda::Create(void* workspace) {
  auto linear = std::make_unique<CublasLinear>(workspace);
  if (const cublasStatus_t status = cublasLtCreate(linear->handle());
      status != CUBLAS_STATUS_SUCCESS) {
    return absl::InternalError(absl::StrCat("cublasLtCreate: ", cublasLtGetStatusName(status)));
  }
  return linear;
}

}  // namespace carrel::kernels
