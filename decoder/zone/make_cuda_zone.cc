#include "decoder/zone/cuda_device_zone.h"
#include "decoder/zone/cuda_host_zone.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {
namespace {

using Made = absl::StatusOr<std::unique_ptr<CudaZoneAttention>>;

constexpr Made (*kPlainZones[])(const OpenedContext&) = {
#define CARREL_ZONE(Name, name) nullptr,  // ValidateDeviceConfig
#define CARREL_GPU_ZONE(Name, name) MakeCuda##Name##Zone,
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
};

// One overload for each of ZoneOptions.
struct CudaMaker {
  const OpenedContext& context;

  Made operator()(const PlainZoneOptions& options) const {
    return kPlainZones[static_cast<size_t>(options.kind)](context);
  }
  Made operator()(const HostZoneOptions& options) const {
    return CudaHostZone::Create(options, context);
  }
  Made operator()(const DeviceZoneOptions&) const {
    return std::make_unique<CudaDeviceZone>(context);
  }
};

}  // namespace

Made MakeCudaZone(const OpenedContext& context) {
  if (context.zone.rows() == 0) return std::make_unique<CudaZoneAttention>(context);
  return std::visit(CudaMaker{context}, context.config.zone);
}

}  // namespace carrel::decoder
