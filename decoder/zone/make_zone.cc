#include "decoder/zone/make_zone.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeZone(const OpenedContext& context) {
  static constexpr decltype(&MakeStoreZone) kPlainZones[] = {
#define CARREL_ZONE(Name, name) Make##Name##Zone,
#define CARREL_GPU_ZONE CARREL_ZONE
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
  };
  const ZoneOptions& zone = context.config.zone;
  if (const auto* const plain = std::get_if<PlainZoneOptions>(&zone))
    return kPlainZones[static_cast<size_t>(plain->kind)](context);
  const auto* const host = std::get_if<HostZoneOptions>(&zone);
  if (host == nullptr)  // ValidateDeviceConfig
    return absl::InternalError("a zone on a GPU, and no GPU");
  return ScansHere(context.config, context.device) ? MakeStoreZone(context)
                                                   : MakeHostZone(*host, context);
}

}  // namespace carrel::decoder
