#include "decoder/select/cuda_row_selector.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/config.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_methods.h"

namespace carrel::decoder {
namespace {

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
  switch (config.kind) {
    case SelectorKind::kExact:
      return CudaExactBytes(shape);
    case SelectorKind::kHip:
      return CudaHipBytes(config.hip, shape);
    case SelectorKind::kInfiniteHip:
      return CudaInfiniteHipBytes(config.infinite_hip, shape);
    case SelectorKind::kHash:
      return CudaHashBytes(config.hash, shape, host_rows);
    case SelectorKind::kChannels:
      return CudaChannelBytes(config.channels, shape);
  }
  return absl::InternalError("unknown selector kind");
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
  if (config.kind != SelectorKind::kHash)
    return absl::InvalidArgumentError("only method=hash chooses on two streams at once");
  return CudaHashForkBytes(config.hash, shape, host_rows);
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeCudaRowSelector(
    const SelectorConfig& given, const CudaZoneShape& shape, const CudaKeys& keys,
    const HostRows* host_rows, ThreadPool* pool, const cuda::Stream& stream) {
  const SelectorConfig config = ResolvedFor(shape, given);
  RETURN_IF_ERROR(ValidateCudaSelector(config));
  CARREL_CHECK(!SelectorNeedsHostRows(config) || host_rows != nullptr);
  switch (config.kind) {
    case SelectorKind::kExact:
      return MakeCudaExactSelector(shape, keys);
    case SelectorKind::kHip:
      return MakeCudaHipSelector(config.hip, shape, keys);
    case SelectorKind::kInfiniteHip:
      return MakeCudaInfiniteHipSelector(config.infinite_hip, shape, keys);
    case SelectorKind::kHash:
      return MakeCudaHashSelector(config.hash, shape, keys, host_rows, stream);
    case SelectorKind::kChannels:
      return MakeCudaChannelSelector(config.channels, shape, keys, *host_rows, pool);
  }
  return absl::InternalError("unknown selector kind");
}

}  // namespace carrel::decoder
