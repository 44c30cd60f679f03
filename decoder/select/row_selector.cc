#include "decoder/select/row_selector.h"

#include "common/status.h"
#include "decoder/select/channel_selector.h"
#include "decoder/select/exact_selector.h"
#include "decoder/select/hash_selector.h"
#include "decoder/select/hip_selector.h"
#include "decoder/select/infinite_hip_selector.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<RowSelector>> MakeRowSelector(const SelectorConfig& given,
                                                             const AttentionShape& shape,
                                                             RowRange zone, const HostRows& rows,
                                                             ThreadPool* pool) {
  const SelectorConfig config = WithOversample(given, kOversample);
  switch (config.kind) {
    case SelectorKind::kExact:
      return MakeExactSelector(config.exact, shape, zone, rows, pool);
    case SelectorKind::kHip:
      return MakeHipSelector(config.hip, shape, zone, rows);
    case SelectorKind::kInfiniteHip:
      return MakeInfiniteHipSelector(config.infinite_hip, shape, zone, rows);
    case SelectorKind::kHash:
      return MakeHashSelector(config.hash, shape, zone, rows, pool);
    case SelectorKind::kChannels:
      return MakeChannelSelector(config.channels, shape, zone, rows, pool);
  }
  return absl::InternalError("unknown selector kind");
}

}  // namespace carrel::decoder
