#include "decoder/select/cuda_row_selector.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_methods.h"

namespace carrel::decoder {

#define CARREL_METHOD(Name)
#define CARREL_GPU_METHOD(Name) const CudaMethod& Cuda##Name##Method();
#include "decoder/select/methods.def"
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD

namespace {

// Null: the method runs on the CPU alone.
const CudaMethod* CudaMethodOf(SelectorKind kind) {
#define CARREL_METHOD(Name) nullptr,
#define CARREL_GPU_METHOD(Name) &Cuda##Name##Method(),
  static const CudaMethod* const methods[] = {
#include "decoder/select/methods.def"
  };
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD
  return methods[static_cast<size_t>(kind)];
}

SelectorConfig ResolvedFor(const CudaZoneShape& shape, const SelectorConfig& config) {
  return WithOversample(config, CudaOversample(kAutoOversample, shape));
}

}  // namespace

bool CudaZoneShape::dense(Layer layer) const {
  const int64_t budget = budgets[static_cast<size_t>(layer.value())];
  return budget == kAllRows || budget >= zone.rows();
}

int64_t CudaZoneShape::largest_budget() const {
  int64_t largest = 0;
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    if (!dense(layer)) largest = std::max(largest, budgets[static_cast<size_t>(layer.value())]);
  }
  return largest;
}

// cudaMemcpy from pageable memory returns before the bytes have arrived, cudaMemset before it ran;
// our streams do not wait for the default one.
absl::Status CopyToDevice(void* to, const void* from, size_t bytes) {
  RETURN_IF_CUDA_ERROR(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));
  return absl::OkStatus();
}

absl::StatusOr<cuda::DeviceBuffer<uint8_t>> ZeroedDeviceBytes(size_t bytes) {
  ASSIGN_OR_RETURN(auto buffer, cuda::DeviceBuffer<uint8_t>::Create(static_cast<int64_t>(bytes)));
  if (bytes > 0) RETURN_IF_CUDA_ERROR(cudaMemset(buffer.data(), 0, bytes));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));
  return buffer;
}

absl::StatusOr<int64_t> CudaRowSelectorBytes(const SelectorConfig& given,
                                             const CudaZoneShape& shape,
                                             const HostRows* host_rows) {
  const SelectorConfig config = ResolvedFor(shape, given);
  RETURN_IF_ERROR(ValidateCudaSelector(config));
  return CudaMethodOf(config.kind)->bytes(config, shape, host_rows);
}

absl::Status CudaRowSelector::SelectAndAttend(Layer layer, const uint16_t*, int64_t,
                                              const CudaAttendSelected&,
                                              const cuda::Stream&) const {
  return absl::InternalError(absl::StrCat("layer ", layer.value(), ": its method does not attend"));
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> CudaRowSelector::Fork(
    const std::vector<int64_t>&) const {
  return nullptr;
}

absl::StatusOr<int64_t> CudaForkBytes(const SelectorConfig& config, const CudaZoneShape& shape,
                                      const HostRows* host_rows) {
  if (!SelectorForks(config))
    return absl::InvalidArgumentError("only method=hash chooses on two streams at once");
  return CudaMethodOf(config.kind)->fork_bytes(config, shape, host_rows);
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeCudaRowSelector(
    const SelectorConfig& given, const CudaZoneShape& shape, const CudaKeys& keys,
    const HostRows* host_rows, ThreadPool* pool, const cuda::Stream& stream) {
  const SelectorConfig config = ResolvedFor(shape, given);
  RETURN_IF_ERROR(ValidateCudaSelector(config));
  CARREL_CHECK(!SelectorNeedsHostRows(config) || host_rows != nullptr);
  return CudaMethodOf(config.kind)->make(config, {shape, keys, host_rows, pool, stream});
}

}  // namespace carrel::decoder
