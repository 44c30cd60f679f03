#include "decoder/zone/store_queries.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"
#include "decoder/client/wire.h"

namespace carrel::decoder {
namespace {

v1::Want WireWant(Want want) {
  switch (want) {
    case Want::kRows:
      return v1::ROWS;
    case Want::kValues:
      return v1::VALUES;
    case Want::kAttend:
      return v1::ATTEND;
  }
  return v1::WANT_UNSPECIFIED;
}

}  // namespace

StoreQueries::StoreQueries(const OpenedContext& context)
    : config_(context.config),
      content_id_(context.content_id),
      shape_(context.shape),
      zone_(context.zone),
      estimate_(Estimates(config_, context.has_summaries)),
      max_top_k_(context.max_top_k),
      selections_(context.selections),
      client_(context.client) {}

std::string StoreQueries::batch_key() const {
  if (config_.want != Want::kAttend || config_.prefetch != Prefetch::kOff || config_.measure ||
      content_id_.empty()) {
    return "";
  }
  std::string key = absl::StrCat(content_id_, " ", zone_.begin, " ", zone_.end, " ", config_.effort,
                                 estimate_ ? " estimated" : "");
  for (const select::Selection& selection : selections_) {
    const auto* const top_k = std::get_if<select::TopK>(&selection);
    if (top_k == nullptr && !select::IsAll(selection)) return "";  // as many as scores say
    if (top_k == nullptr) {
      key += " all";
    } else {
      absl::StrAppend(&key, " ", top_k->rows, ":", absl::StrJoin(top_k->of_head, ","));
    }
  }
  return key;
}

v1::Query StoreQueries::Make(Layer layer, const float* q, int64_t n) const {
  v1::Query query;
  query.set_layer(layer.value());
  SetFloats(q, {n, shape_.q_heads, shape_.head_dim}, query.mutable_queries());
  SetSelection(selection(layer), query);
  query.set_want(WireWant(config_.want));
  query.set_effort(static_cast<uint32_t>(config_.effort));
  query.set_estimate(estimate_ && !all_rows(layer));
  return query;
}

absl::Status StoreQueries::Attend(Layer layer, const float* q, int64_t n, Partial& partial,
                                  LayerStatistics& statistics) const {
  AttendQuery query;
  query.layer = layer;
  query.q = q;
  query.n = n;
  query.selection = &selection(layer);
  query.effort = config_.effort;
  query.estimate = estimate_ && !all_rows(layer);
  AttendReply reply;
  reply.out = partial.out.data();
  reply.lse = partial.lse.data();
  const absl::Time start = absl::Now();
  RETURN_IF_ERROR(client_->Attend(query, reply));
  statistics.exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
  statistics.bytes_received += reply.bytes;
  statistics.candidates += reply.candidates;
  statistics.visited += reply.visited;
  statistics.rows_attended += reply.rows;
  statistics.estimated = query.estimate;
  return absl::OkStatus();
}

v1::Query StoreQueries::MakeDense(Layer layer, const float* q, int64_t n) const {
  v1::Query query;
  query.set_layer(layer.value());
  SetFloats(q, {n, shape_.q_heads, shape_.head_dim}, query.mutable_queries());
  SetSelection(select::All(), query);
  query.set_want(v1::ATTEND);
  return query;
}

v1::Query StoreQueries::MakeAhead(Layer layer, const float* predicted_q, int64_t n) const {
  v1::Query query = Make(layer, predicted_q, n);
  SetSelection(select::TopK{RowsAhead(layer)}, query);
  query.set_speculative(true);
  query.set_estimate(false);
  query.set_want(config_.want == Want::kRows ? v1::ROWS : v1::IDS);
  return query;
}

int64_t StoreQueries::RowsAhead(Layer layer) const {
  const auto rows = static_cast<double>(select::TopKRows(selection(layer)));
  return std::min<int64_t>({std::llround(config_.oversample * rows), zone_.rows(), max_top_k_});
}

absl::StatusOr<std::vector<v1::SessionReply>> StoreQueries::Receive(
    RequestId id, LayerStatistics* statistics) const {
  std::vector<v1::SessionReply> parts;
  do {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(v1::SessionReply part, client_->Next(id));
    if (statistics != nullptr) {
      statistics->exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
      statistics->bytes_received += static_cast<int64_t>(part.ByteSizeLong());
      statistics->candidates += part.query().statistics().candidates();
      statistics->visited += part.query().statistics().visited();
    }
    parts.push_back(std::move(part));
  } while (!parts.back().last());
  return parts;
}

absl::Status StoreQueries::CheckHead(const v1::HeadResult& head, int64_t n) const {
  if (head.token() < n && head.kv_head() < static_cast<uint32_t>(shape_.kv_heads))
    return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("reply: token ", head.token(), " kv_head ",
                                          head.kv_head(), " was not asked for"));
}

absl::Status StoreQueries::MergeAttend(const v1::QueryReply& reply, int64_t n,
                                       Partial& partial) const {
  const int64_t d = shape_.head_dim, group = shape_.group();
  std::vector<float> out, lse;
  for (const v1::HeadResult& head : reply.heads()) {
    RETURN_IF_ERROR(CheckHead(head, n));
    RETURN_IF_ERROR(CheckFloats(head.out(), {group, d}, "out"));
    RETURN_IF_ERROR(CheckFloats(head.lse(), {group}, "lse"));
    CopyFloats(head.out(), out);
    CopyFloats(head.lse(), lse);
    partial.Merge(head.token(), shape_.q_heads, head.kv_head() * group, group, d, out.data(),
                  lse.data());
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
