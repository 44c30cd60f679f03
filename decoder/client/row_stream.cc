#include "decoder/client/row_stream.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::decoder {

RowStream::RowStream(retrieval::Session* client, const AttentionShape& shape, Layer layer,
                     RowRange range, int64_t max_fetch_rows)
    : client_(client),
      shape_(shape),
      layer_(layer),
      range_(range),
      rows_per_request_(std::max<int64_t>(1, max_fetch_rows / shape.kv_heads)),
      next_(range.begin) {}

absl::Status RowStream::SendNext() {
  if (next_ >= range_.end) return absl::OkStatus();
  const RowRange range{next_, std::min(range_.end, next_ + rows_per_request_)};
  ASSIGN_OR_RETURN(const retrieval::RequestId id,
                   client_->Send(retrieval::Fetch{.layer = layer_, .range = range}));
  in_flight_.push_back({id, range});
  next_ = range.end;
  return absl::OkStatus();
}

absl::Status RowStream::Start() {
  while (static_cast<int>(in_flight_.size()) < kRequestsAhead && next_ < range_.end)
    RETURN_IF_ERROR(SendNext());
  return absl::OkStatus();
}

absl::Status RowStream::Drain(Sink sink, double* waited_us, int64_t* bytes) {
  RETURN_IF_ERROR(Start());
  while (!in_flight_.empty()) {
    const Request request = in_flight_.front();
    in_flight_.pop_front();
    RETURN_IF_ERROR(DrainOne(request, sink, waited_us, bytes));
    RETURN_IF_ERROR(SendNext());
  }
  return absl::OkStatus();
}

absl::Status RowStream::DrainOne(const Request& request, Sink sink, double* waited_us,
                                 int64_t* bytes) {
  std::vector<int64_t> seen(shape_.kv_heads, 0);
  for (bool last = false; !last;) {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(const retrieval::Part part, client_->Next(request.id));
    *waited_us += absl::ToDoubleMicroseconds(absl::Now() - start);
    *bytes += part.bytes;
    last = part.last;
    for (const retrieval::Piece& piece : part.pieces) {
      const int32_t head = piece.kv_head.value();
      if (head < 0 || head >= shape_.kv_heads || piece.first_row != seen[head] ||
          piece.k.size() != piece.v.size()) {
        return absl::DataLossError(absl::StrCat("fetch rows: layer ", layer_.value(), " kv_head ",
                                                head, ": block at ", piece.first_row,
                                                " does not continue the rows received"));
      }
      if (piece.k.empty()) continue;
      const auto rows = static_cast<int64_t>(piece.k.size());
      sink(piece.kv_head, request.range.begin + piece.first_row, rows, piece.k.front(),
           piece.v.front());
      seen[head] += rows;
    }
  }
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    if (seen[head] != request.range.rows()) {
      return absl::DataLossError(absl::StrCat("fetch rows: layer ", layer_.value(), " kv_head ",
                                              head, ": ", seen[head], " of ", request.range.rows(),
                                              " rows from ", request.range.begin, " arrived"));
    }
  }
  return absl::OkStatus();
}

void RowStream::Cancel() {
  for (const Request& request : in_flight_) client_->Forget(request.id);
  in_flight_.clear();
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
