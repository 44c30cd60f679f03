#include "decoder/zone/store_queries.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::decoder {
StoreQueries::StoreQueries(const OpenedContext* context)
    : context_(*context),
      estimate_(Estimates(context_.config, context_.has_summaries)),
      scan_(ScansHere(context_.config, context_.device)),
      prompt_takes_all_(PromptTakesAll(context_.config, context_.device)) {}

std::string StoreQueries::batch_key() const {
  const RetrievalConfig& config = context_.config;
  if (config.want != Want::kAttend || config.prefetch != Prefetch::kOff || config.measure ||
      prompt_takes_all_ || context_.content_id.empty()) {
    return "";
  }
  std::string key =
      absl::StrCat(context_.content_id, " ", zone().begin, " ", zone().end, " ", config.effort,
                   estimate_ ? " estimated" : "", scan_ ? " scanned" : "");
  for (const select::Selection& selection : context_.selections) {
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

retrieval::Query StoreQueries::Make(Layer layer, const float* q, int64_t n) const {
  retrieval::Query query;
  query.layer = layer;
  query.tokens = n;
  query.queries.assign(q, q + n * shape().q_heads * shape().head_dim);
  query.selection = selection(layer);
  query.want = context_.config.want;
  query.effort = context_.config.effort;
  query.estimate = estimate_ && !all_rows(layer);
  query.scan = scan_;
  return query;
}

absl::Status StoreQueries::Attend(Layer layer, const float* q, int64_t n, bool all,
                                  Partial& partial, LayerStatistics& statistics) const {
  retrieval::AttendReply reply;
  reply.out = partial.out.data();
  reply.lse = partial.lse.data();
  const absl::Time start = absl::Now();
  RETURN_IF_ERROR(client()->Attend(all ? MakeDense(layer, q, n) : Make(layer, q, n), reply));
  statistics.exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
  statistics.bytes_received += reply.bytes;
  statistics.candidates += reply.statistics.candidates;
  statistics.visited += reply.statistics.visited;
  statistics.rows_attended += reply.statistics.rows;
  if (!all) statistics.estimated = estimate_ && !all_rows(layer);
  return absl::OkStatus();
}

retrieval::Query StoreQueries::MakeDense(Layer layer, const float* q, int64_t n) const {
  retrieval::Query query = Make(layer, q, n);
  query.selection = select::All();
  query.want = Want::kAttend;
  query.effort = 0;
  query.estimate = false;
  return query;
}

retrieval::Query StoreQueries::MakeAhead(Layer layer, const float* predicted_q, int64_t n) const {
  retrieval::Query query = Make(layer, predicted_q, n);
  query.selection = select::TopK{RowsAhead(layer)};
  query.speculative = true;
  query.estimate = false;
  query.want = context_.config.want == Want::kRows ? Want::kRows : Want::kIds;
  return query;
}

int64_t StoreQueries::RowsAhead(Layer layer) const {
  const auto rows = static_cast<double>(select::TopKRows(selection(layer)));
  return std::min<int64_t>(
      {std::llround(context_.config.oversample * rows), zone().rows(), context_.max_top_k});
}

absl::StatusOr<std::vector<retrieval::Part>> StoreQueries::Receive(
    retrieval::RequestId id, LayerStatistics* statistics) const {
  std::vector<retrieval::Part> parts;
  do {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(retrieval::Part part, client()->Next(id));
    if (statistics != nullptr) {
      statistics->exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
      statistics->bytes_received += part.bytes;
      statistics->candidates += part.statistics.candidates;
      statistics->visited += part.statistics.visited;
    }
    parts.push_back(std::move(part));
  } while (!parts.back().last);
  return parts;
}

absl::Status StoreQueries::CheckPiece(const retrieval::Piece& piece, int64_t n) const {
  if (piece.token < n && piece.kv_head.value() < shape().kv_heads) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("reply: token ", piece.token, " kv_head ",
                                          piece.kv_head.value(), " was not asked for"));
}

absl::Status StoreQueries::MergeAttend(const retrieval::Part& part, int64_t n,
                                       Partial& partial) const {
  const int64_t d = shape().head_dim, group = shape().group();
  for (const retrieval::Piece& piece : part.pieces) {
    RETURN_IF_ERROR(CheckPiece(piece, n));
    if (static_cast<int64_t>(piece.out.size()) != group * d ||
        static_cast<int64_t>(piece.lse.size()) != group) {
      return absl::DataLossError(absl::StrCat("reply: out of ", piece.out.size(), " and lse of ",
                                              piece.lse.size(), " numbers, expected ", group * d,
                                              " and ", group));
    }
    partial.Merge(shape(), piece.token, piece.kv_head, piece.out.data(), piece.lse.data());
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
