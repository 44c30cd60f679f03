#include "decoder/zone/cuda_zone_work.h"

#include "common/cuda/status.h"
#include "common/status.h"

namespace carrel::decoder {

absl::Status CudaZoneWork::Launch(const cuda::Stream& stream) const {
  RETURN_IF_ERROR(choices.Launch(stream));
  for (const cuda::Event* const event : fetched) RETURN_IF_ERROR(stream.WaitFor(*event));
  RETURN_IF_CUDA_ERROR(kernels::UseRowBanks(banks, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::GatherPackedRowsCuda(gathers, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(to_chosen, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(to_all, stream.get()));
  for (const kernels::SummaryAttentionCudaParams& one : to_rest) {
    RETURN_IF_CUDA_ERROR(kernels::AttendSummariesCuda(one, stream.get()));
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
