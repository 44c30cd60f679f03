#include "decoder/zone/make_zone.h"

#include "decoder/zone/host_zone.h"
#include "decoder/zone/store_zone.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeZone(const OpenedContext& context,
                                                        std::vector<LayerStatistics>* statistics) {
  if (context.config.selector.has_value()) return HostZone::Create(context, statistics);
  return std::make_unique<StoreZone>(context, statistics);
}

}  // namespace carrel::decoder
