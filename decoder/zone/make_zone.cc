#include "decoder/zone/make_zone.h"

#include "decoder/zone/host_zone.h"

namespace carrel::decoder {
namespace {

using Made = absl::StatusOr<std::unique_ptr<ZoneAttention>>;

constexpr Made (*kPlainZones[])(const OpenedContext&) = {
#define CARREL_ZONE(Name, name) Make##Name##Zone,
#define CARREL_GPU_ZONE CARREL_ZONE
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
};

// One overload for each of ZoneOptions.
struct Maker {
  const OpenedContext& context;

  Made operator()(const PlainZoneOptions& options) const {
    return kPlainZones[static_cast<size_t>(options.kind)](context);
  }
  Made operator()(const HostZoneOptions& options) const {
    if (ScansHere(context.config, context.device)) return MakeStoreZone(context);
    return HostZone::Create(options, context);
  }
  Made operator()(const DeviceZoneOptions&) const {
    return absl::InternalError("a zone on a GPU, and no GPU");  // ValidateDeviceConfig
  }
};

}  // namespace

Made MakeZone(const OpenedContext& context) {
  return std::visit(Maker{context}, context.config.zone);
}

}  // namespace carrel::decoder
