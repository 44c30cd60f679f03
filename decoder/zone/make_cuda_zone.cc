#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/zone/cuda_device_zone.h"
#include "decoder/zone/cuda_host_zone.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {
namespace {

using Made = absl::StatusOr<std::unique_ptr<CudaZoneAttention>>;

constexpr Made (*kPlainZones[])(const OpenedContext&, std::vector<LayerStatistics>*) = {
#define CARREL_ZONE(Name, name) nullptr,  // ValidateDeviceConfig
#define CARREL_GPU_ZONE(Name, name) MakeCuda##Name##Zone,
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
};

// One overload for each of ZoneOptions.
struct CudaMaker {
  const OpenedContext& context;
  std::vector<LayerStatistics>* statistics;

  Made operator()(const PlainZoneOptions& options) const {
    return kPlainZones[static_cast<size_t>(options.kind)](context, statistics);
  }
  Made operator()(const HostZoneOptions& options) const {
    return CudaHostZone::Create(options, context);
  }
  Made operator()(const DeviceZoneOptions& options) const {
    return std::make_unique<CudaDeviceZone>(options, context);
  }
};

}  // namespace

std::string SharedZoneKey(const OpenedContext& context, const std::string& place,
                          const SelectorConfig& method, const CudaZoneShape& shape) {
  int device = 0;
  if (context.content_id.empty() || cudaGetDevice(&device) != cudaSuccess) return "";
  return absl::StrCat(place, " ", device, " ", context.content_id, " ", shape.zone.begin, " ",
                      shape.zone.end, " ", DescribeSelector(method), " ",
                      absl::StrJoin(shape.budgets, ","), " ",
                      absl::StrJoin(shape.head_budgets, ","));
}

Made MakeCudaZone(const OpenedContext& context, std::vector<LayerStatistics>* statistics) {
  for (size_t l = 0; l < context.selections.size(); ++l)
    (*statistics)[l].selection = context.selections[l];
  if (context.zone.rows() == 0) return std::make_unique<CudaZoneAttention>();
  return std::visit(CudaMaker{context, statistics}, context.config.zone);
}

}  // namespace carrel::decoder
