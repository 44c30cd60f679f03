// What:      makes the zone that the options name. The only place that looks at where a zone lives.
// Errors:    those of MakeHostZone, RowCache::Slots, PlanBanks.
// Ownership: as OpenedContext.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "decoder/zone/repositioned_attention.h"
#include "decoder/zone/zone_attention.h"

namespace carrel::decoder {

class CudaZoneAttention;

absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeZone(const OpenedContext& context);

// In a build with CUDA. Takes no device memory before Load.
absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaZone(const OpenedContext& context);

// Of zones.def, each beside its zone; those of a GPU in a build with CUDA.
#define CARREL_ZONE(Name, name) \
  absl::StatusOr<std::unique_ptr<ZoneAttention>> Make##Name##Zone(const OpenedContext& context);
#define CARREL_GPU_ZONE(Name, name)                                        \
  CARREL_ZONE(Name, name)                                                  \
  absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCuda##Name##Zone( \
      const OpenedContext& context);
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE

// In this host's memory, context.rows, where a method chooses. NotFound what the method needs and the context lacks;
// FailedPrecondition estimate=on without summaries; DataLoss damaged summaries. positions: attends to the window, too,
// whose part of the attention is the empty set then; null: rows stand at their own.
absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeHostZone(
    const HostZoneOptions& options, const OpenedContext& context,
    std::unique_ptr<RepositionedAttention> positions = nullptr);
// Of rows that this process holds for a GPU, on the device or in pinned memory of this host; not empty.
absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaHeldZone(const OpenedContext& context);

}  // namespace carrel::decoder
