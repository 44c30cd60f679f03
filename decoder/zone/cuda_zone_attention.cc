#include "decoder/zone/cuda_zone_attention.h"

#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/zone/make_zone.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/of_heads.h"

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

absl::Status AttendBlock(const AttentionShape& heads, const CudaQueries& queries,
                         const kernels::KvView& kv, int64_t first, int64_t rows,
                         const CudaPartial& to, const cuda::Stream& stream) {
  auto params = kernels::OfHeads<kernels::PrefillAttentionCudaParams>(heads);
  params.q = queries.rounded;
  params.kv = kv;
  params.n = queries.n;
  params.first_position = first;
  params.rows = rows;
  params.out_exact = to.out;
  params.lse = to.lse;
  params.room = queries.room;
  RETURN_IF_CUDA_ERROR(kernels::PrefillAttentionCuda(params, stream.get()));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaZone(const OpenedContext& context) {
  static constexpr decltype(&MakeCudaStoreZone) kPlainZones[] = {
#define CARREL_ZONE(Name, name) nullptr,  // ValidateDeviceConfig
#define CARREL_GPU_ZONE(Name, name) MakeCuda##Name##Zone,
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
  };
  if (context.zone.rows() == 0) return std::make_unique<CudaZoneAttention>(context);
  if (const auto* const plain = std::get_if<PlainZoneOptions>(&context.config.zone))
    return kPlainZones[static_cast<size_t>(plain->kind)](context);
  return MakeCudaHeldZone(context);
}

}  // namespace carrel::decoder
