#include "decoder/refine/refiner.h"

#include "common/status.h"
#include "decoder/refine/channel_refiner.h"
#include "decoder/refine/exact_refiner.h"
#include "decoder/refine/hash_refiner.h"
#include "decoder/refine/hip_refiner.h"
#include "decoder/refine/infinite_hip_refiner.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<Refiner>> MakeRefiner(const RefineConfig& given,
                                                     const AttentionShape& shape, RowRange zone,
                                                     const HostRows& rows, ThreadPool* pool) {
  const RefineConfig config = WithOversample(given, kOversample);
  switch (config.kind) {
    case RefineKind::kExact:
      return MakeExactRefiner(config.exact, shape, zone, rows, pool);
    case RefineKind::kHip:
      return MakeHipRefiner(config.hip, shape, zone, rows);
    case RefineKind::kInfiniteHip:
      return MakeInfiniteHipRefiner(config.infinite_hip, shape, zone, rows);
    case RefineKind::kHash:
      return MakeHashRefiner(config.hash, shape, zone, rows, pool);
    case RefineKind::kChannels:
      return MakeChannelRefiner(config.channels, shape, zone, rows, pool);
  }
  return absl::InternalError("unknown refine kind");
}

}  // namespace carrel::decoder
