#include "decoder/client/context_rows.h"

#include <deque>
#include <utility>

#include "common/status.h"

namespace carrel::decoder {

absl::Status ReadContextRows(retrieval::Session* client, const AttentionShape& shape,
                             absl::Span<const RowRange> ranges, int64_t max_fetch_rows,
                             absl::FunctionRef<absl::Status(const ContextRows&)> take) {
  return ReadContextRows(
      client, shape, [&](Layer) { return ranges; }, max_fetch_rows, take);
}

absl::Status ReadContextRows(retrieval::Session* client, const AttentionShape& shape,
                             absl::FunctionRef<absl::Span<const RowRange>(Layer)> ranges,
                             int64_t max_fetch_rows,
                             absl::FunctionRef<absl::Status(const ContextRows&)> take) {
  constexpr size_t kStreamsAhead = 8;  // requests in flight hide the round trips
  std::deque<std::pair<Layer, RowStream>> streams;
  const auto drain_first = [&]() -> absl::Status {
    auto& [layer, stream] = streams.front();
    double waited_us = 0;
    int64_t bytes = 0;
    absl::Status taken;
    RETURN_IF_ERROR(stream.Drain(
        [&, layer = layer](KvHead head, Position first, int64_t rows, const void* k,
                           const void* v) {
          taken.Update(take({layer, head, first, rows, k, v}));
        },
        &waited_us, &bytes));
    streams.pop_front();
    return taken;
  };
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    for (const RowRange& range : ranges(layer)) {
      streams.emplace_back(layer, RowStream(client, shape, layer, range, max_fetch_rows));
      RETURN_IF_ERROR(streams.back().second.Start());
      if (streams.size() > kStreamsAhead) RETURN_IF_ERROR(drain_first());
    }
  }
  while (!streams.empty()) RETURN_IF_ERROR(drain_first());
  return absl::OkStatus();
}

}  // namespace carrel::decoder
