#include "decoder/zone/cuda_device_zone.h"
#include "decoder/zone/cuda_host_zone.h"
#include "decoder/zone/cuda_store_zone.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaZone(
    const OpenedContext& context, std::vector<LayerStatistics>* statistics) {
  const std::vector<int64_t> budgets =
      LayerBudgets(context.config, context.shape.layers, context.zone.rows());
  for (size_t l = 0; l < budgets.size(); ++l) (*statistics)[l].top_k = budgets[l];
  if (context.zone.rows() == 0) return std::make_unique<CudaZoneAttention>();
  if (context.device.zone_on_device) return std::make_unique<CudaDeviceZone>(context);
  if (context.device.zone_in_host) return CudaHostZone::Create(context);
  return std::make_unique<CudaStoreZone>(context, statistics);
}

}  // namespace carrel::decoder
