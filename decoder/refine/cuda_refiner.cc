#include "decoder/refine/cuda_refiner.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/config.h"
#include "decoder/refine/cuda_candidates.h"
#include "decoder/refine/cuda_methods.h"

namespace carrel::decoder {
namespace {

RefineConfig ResolvedFor(const CudaZoneShape& shape, const RefineConfig& config) {
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

absl::StatusOr<int64_t> CudaRefinerBytes(const RefineConfig& given, const CudaZoneShape& shape,
                                         const HostRows* host_rows) {
  const RefineConfig config = ResolvedFor(shape, given);
  switch (config.kind) {
    case RefineKind::kExact:
      return CudaExactBytes(shape);
    case RefineKind::kHip:
      return CudaHipBytes(config.hip, shape);
    case RefineKind::kInfiniteHip:
      return CudaInfiniteHipBytes(config.infinite_hip, shape);
    case RefineKind::kHash:
      return CudaHashBytes(config.hash, shape, host_rows);
    case RefineKind::kChannels:
      return CudaChannelBytes(config.channels, shape);
  }
  return absl::InternalError("unknown refine kind");
}

absl::Status CudaRefiner::SelectAndAttend(Layer layer, const uint16_t*, int64_t,
                                          const CudaAttendSelected&, const cuda::Stream&) const {
  return absl::InternalError(absl::StrCat("layer ", layer.value(), ": its method does not attend"));
}

absl::StatusOr<std::unique_ptr<CudaRefiner>> CudaRefiner::Fork(const std::vector<int64_t>&) const {
  return nullptr;
}

absl::StatusOr<int64_t> CudaForkBytes(const RefineConfig& config, const CudaZoneShape& shape,
                                      const HostRows* host_rows) {
  if (config.kind != RefineKind::kHash)
    return absl::InvalidArgumentError("only refine=hash chooses on two streams at once");
  return CudaHashForkBytes(config.hash, shape, host_rows);
}

absl::StatusOr<std::unique_ptr<CudaRefiner>> MakeCudaRefiner(
    const RefineConfig& given, const CudaZoneShape& shape, const CudaKeys& keys,
    const HostRows* host_rows, ThreadPool* pool, const cuda::Stream& stream) {
  const RefineConfig config = ResolvedFor(shape, given);
  RETURN_IF_ERROR(ValidateCudaRefine(config));
  CARREL_CHECK(!RefineNeedsHostRows(config) || host_rows != nullptr);
  switch (config.kind) {
    case RefineKind::kExact:
      return MakeCudaExactRefiner(shape, keys);
    case RefineKind::kHip:
      return MakeCudaHipRefiner(config.hip, shape, keys);
    case RefineKind::kInfiniteHip:
      return MakeCudaInfiniteHipRefiner(config.infinite_hip, shape, keys);
    case RefineKind::kHash:
      return MakeCudaHashRefiner(config.hash, shape, keys, host_rows, stream);
    case RefineKind::kChannels:
      return MakeCudaChannelRefiner(config.channels, shape, keys, *host_rows, pool);
  }
  return absl::InternalError("unknown refine kind");
}

}  // namespace carrel::decoder
