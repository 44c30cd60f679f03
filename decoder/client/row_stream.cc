#include "decoder/client/row_stream.h"

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"
#include "decoder/client/wire.h"

namespace carrel::decoder {

RowStream::RowStream(StoreClient* client, const AttentionShape& shape, Layer layer, RowRange range,
                     int64_t max_fetch_rows)
    : client_(client),
      shape_(shape),
      layer_(layer),
      range_(range),
      rows_per_request_(std::max<int64_t>(1, max_fetch_rows / shape.kv_heads)),
      next_(range.begin) {}

absl::Status RowStream::SendNext() {
  if (next_ >= range_.end) return absl::OkStatus();
  const RowRange range{next_, std::min(range_.end, next_ + rows_per_request_)};
  v1::FetchRows fetch;
  fetch.set_layer(layer_.value());
  fetch.mutable_range()->set_begin(range.begin);
  fetch.mutable_range()->set_end(range.end);
  ASSIGN_OR_RETURN(const RequestId id, client_->Send(std::move(fetch)));
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
  const int64_t d = shape_.head_dim;
  std::vector<int64_t> seen(shape_.kv_heads, 0);
  for (bool last = false; !last;) {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(const v1::SessionReply reply, client_->Next(request.id));
    *waited_us += absl::ToDoubleMicroseconds(absl::Now() - start);
    *bytes += static_cast<int64_t>(reply.ByteSizeLong());
    last = reply.last();
    for (const v1::FetchRowsReply::RowBlock& block : reply.fetch_rows().blocks()) {
      const int64_t rows = Dimension(block.k(), 0);
      RETURN_IF_ERROR(CheckBf16(block.k(), {rows, d}, "K rows"));
      RETURN_IF_ERROR(CheckBf16(block.v(), {rows, d}, "V rows"));
      if (block.kv_head() >= static_cast<uint32_t>(shape_.kv_heads) ||
          block.first() != seen[block.kv_head()]) {
        return absl::DataLossError(absl::StrCat("fetch rows: layer ", layer_.value(), " kv_head ",
                                                block.kv_head(), ": block at ", block.first(),
                                                " does not continue the rows received"));
      }
      sink(KvHead(static_cast<int32_t>(block.kv_head())), request.range.begin + block.first(), rows,
           block.k().data().data(), block.v().data().data());
      seen[block.kv_head()] += rows;
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

}  // namespace carrel::decoder
