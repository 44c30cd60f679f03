#include "decoder/select/row_selector.h"

#include "decoder/select/method_type.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<RowSelector>> MakeRowSelector(const SelectorConfig& given,
                                                             const AttentionShape& shape,
                                                             RowRange zone, const HostRows& rows,
                                                             ThreadPool* pool) {
  const SelectorConfig config = WithOversample(given, kOversample);
  return MethodOf(config.kind).Make(config, {shape, zone, rows, pool});
}

}  // namespace carrel::decoder
