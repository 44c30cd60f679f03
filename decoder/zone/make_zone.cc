#include "decoder/zone/make_zone.h"

#include "decoder/zone/host_zone.h"
#include "decoder/zone/store_zone.h"

namespace carrel::decoder {
namespace {

using Made = absl::StatusOr<std::unique_ptr<ZoneAttention>>;

// One overload for each of ZoneOptions.
struct Maker {
  const OpenedContext& context;
  std::vector<LayerStatistics>* statistics;

  Made operator()(const StoreZoneOptions&) const {
    return std::make_unique<StoreZone>(context, statistics);
  }
  Made operator()(const HostZoneOptions& options) const {
    return HostZone::Create(options, context, statistics);
  }
  Made operator()(const DeviceZoneOptions&) const {
    return absl::InternalError("a zone on a GPU, and no GPU");  // ValidateDeviceConfig
  }
};

}  // namespace

Made MakeZone(const OpenedContext& context, std::vector<LayerStatistics>* statistics) {
  return std::visit(Maker{context, statistics}, context.config.zone);
}

}  // namespace carrel::decoder
