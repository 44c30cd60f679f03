#include "decoder/zone/host_zone.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/q_head_rows.h"
#include "decoder/zone/output_error.h"
#include "decoder/zone/retrieval_meter.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<HostZone>> HostZone::Create(
    const HostZoneOptions& options, const OpenedContext& context,
    std::vector<LayerStatistics>* statistics) {
  const RetrievalConfig& config = context.config;
  CARREL_CHECK(context.rows != nullptr);
  if (config.estimate == Estimate::kOn && !context.rows->has_summaries()) {
    return absl::FailedPreconditionError(
        "estimate=on: the context has no summaries; carrel reindex --summaries 40 makes them");
  }
  OpenedContext heads = context;
  if (options.selector.mask == SelectorMask::kQHead) {
    heads.shape = PerQHead(context.shape);
    heads.rows = std::make_shared<QHeadRows>(context.rows, context.shape.group());
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<RowSelector> selector,
      MakeRowSelector(options.selector, heads.shape, heads.zone, *heads.rows, heads.pool));
  return std::unique_ptr<HostZone>(new HostZone(heads, std::move(selector), statistics));
}

HostZone::HostZone(const OpenedContext& context, std::unique_ptr<RowSelector> selector,
                   std::vector<LayerStatistics>* statistics)
    : config_(context.config),
      shape_(context.shape),
      zone_(context.zone),
      selections_(context.selections),
      estimate_(config_.estimate != Estimate::kOff && context.rows->has_summaries()),
      scale_(1.0f / std::sqrt(static_cast<float>(shape_.head_dim))),
      rows_(context.rows),
      selector_(std::move(selector)),
      pool_(context.pool),
      statistics_(statistics),
      steps_(static_cast<size_t>(shape_.layers)) {
  for (int32_t layer = 0; layer < shape_.layers; ++layer) {
    (*statistics_)[layer].selection = selections_[static_cast<size_t>(layer)];
  }
}

absl::Status HostZone::Prefetch(Layer, const float*, int64_t) { return absl::OkStatus(); }

absl::Status HostZone::Start(Layer layer, const float*, int64_t n) {
  (*statistics_)[layer.value()].tokens += n;
  return absl::OkStatus();
}

absl::Status HostZone::Finish(Layer layer, const float* q, int64_t n, Partial& partial) {
  partial.Reset(n, shape_.q_heads, shape_.head_dim);
  if (zone_.rows() == 0) return absl::OkStatus();
  if (!select::IsAll(selections_[static_cast<size_t>(layer.value())]))
    return AttendSelected(layer, q, n, partial);
  AttendAll(layer, q, n, partial);
  LayerStatistics& statistics = (*statistics_)[layer.value()];
  const int64_t rows = zone_.rows() * shape_.kv_heads * n;
  statistics.rows_attended += rows;
  statistics.candidates += rows;
  statistics.bytes_read += 2 * rows * shape_.head_dim * 2;
  return absl::OkStatus();
}

void HostZone::AttendRows(Layer layer, KvHead head, const float* q, int64_t token,
                          const std::vector<Position>& rows, std::vector<float>& scores,
                          Partial& partial) const {
  thread_local std::vector<const void*> k, v;
  thread_local std::vector<float> out;
  const int64_t d = shape_.head_dim, group = shape_.group();
  const HeadView& of_head = rows_->At(layer, head);
  k.resize(rows.size());
  v.resize(rows.size());
  for (size_t j = 0; j < rows.size(); ++j) {
    k[j] = of_head.Key(rows[j]);
    v[j] = of_head.Value(rows[j]);
  }
  scores.resize(static_cast<size_t>(group) * rows.size());
  out.resize(static_cast<size_t>(group * (d + 1)));
  kernels::SparseAttentionParams params;
  params.q = q + (token * shape_.q_heads + head.value() * group) * d;
  params.group = group;
  params.k = k.data();
  params.v = v.data();
  params.rows = static_cast<int64_t>(rows.size());
  params.head_dim = d;
  params.scale = scale_;
  params.scores = scores.data();
  params.out = out.data();
  params.lse = out.data() + group * d;
  kernels::SparseAttention(params);
  partial.Merge(token, shape_.q_heads, head.value() * group, group, d, params.out, params.lse);
}

absl::Status HostZone::EstimateRest(Layer layer, KvHead head, const float* q, int64_t token,
                                    const std::vector<Position>& rows,
                                    const std::vector<float>& scores, const float* bound,
                                    Partial& partial) const {
  if (static_cast<int64_t>(rows.size()) == zone_.rows()) return absl::OkStatus();
  thread_local std::vector<float> out;
  const int64_t d = shape_.head_dim, group = shape_.group();
  out.resize(static_cast<size_t>(group * (d + 1)));
  RestRequest rest;
  rest.layer = layer;
  rest.head = head;
  rest.q = q + (token * shape_.q_heads + head.value() * group) * d;
  rest.group = group;
  rest.scale = scale_;
  rest.zone = zone_;
  rest.selected = rows;
  rest.scores = scores.data();
  rest.bound = bound;
  rest.out = out.data();
  rest.lse = out.data() + group * d;
  RETURN_IF_ERROR(rows_->EstimateRest(rest));
  partial.Merge(token, shape_.q_heads, head.value() * group, group, d, rest.out, rest.lse);
  return absl::OkStatus();
}

void HostZone::AttendAll(Layer layer, const float* q, int64_t n, Partial& partial) const {
  std::vector<Position> all;
  AllRows(zone_, all);
  pool_->ParallelFor(n * shape_.kv_heads, [&](int64_t unit) {
    thread_local std::vector<float> scores;
    const KvHead head(static_cast<int32_t>(unit % shape_.kv_heads));
    AttendRows(layer, head, q, unit / shape_.kv_heads, all, scores, partial);
  });
}

absl::Status HostZone::AttendSelected(Layer layer, const float* q, int64_t n, Partial& partial) {
  const int64_t d = shape_.head_dim, group = shape_.group();
  const int64_t block = reading_prompt_ ? selector_->block_tokens() : 1;
  int64_t& step = steps_[static_cast<size_t>(layer.value())];
  if (reading_prompt_) step = 0;
  const auto& top_k = std::get<select::TopK>(selections_[static_cast<size_t>(layer.value())]);
  std::vector<SelectedRows> totals(static_cast<size_t>(shape_.kv_heads));
  std::vector<int64_t> attended(totals.size());
  std::vector<absl::Status> statuses(totals.size());
  pool_->ParallelFor(shape_.kv_heads, [&](int64_t h) {
    const KvHead head(static_cast<int32_t>(h));
    thread_local std::vector<float> queries, scores;
    SelectedRows& selection = totals[static_cast<size_t>(h)];
    for (int64_t first = 0; first < n; first += block) {
      const int64_t tokens = std::min(block, n - first);
      queries.clear();
      for (int64_t i = first; i < first + tokens; ++i) {
        const float* of_token = q + (i * shape_.q_heads + h * group) * d;
        queries.insert(queries.end(), of_token, of_token + group * d);
      }
      SelectRequest request;
      request.layer = layer;
      request.head = head;
      request.q = queries.data();
      request.queries = tokens * group;
      request.budget = top_k.Of(head);
      request.step = reading_prompt_ ? kPromptStep : step + first;
      selection.bound.clear();
      selector_->Select(request, selection);
      for (int64_t i = first; i < first + tokens; ++i) {
        AttendRows(layer, head, q, i, selection.rows, scores, partial);
        if (!estimate_) continue;
        const float* bound = selection.bound.empty()
                                 ? nullptr
                                 : &selection.bound[static_cast<size_t>((i - first) * group)];
        statuses[static_cast<size_t>(h)].Update(
            EstimateRest(layer, head, q, i, selection.rows, scores, bound, partial));
      }
      attended[static_cast<size_t>(h)] += tokens * static_cast<int64_t>(selection.rows.size());
    }
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  if (!reading_prompt_) step += n;
  LayerStatistics& statistics = (*statistics_)[layer.value()];
  statistics.estimated = estimate_;
  for (size_t h = 0; h < totals.size(); ++h) {
    statistics.candidates += totals[h].keys_scored;
    statistics.visited += totals[h].visited * group;
    statistics.rows_attended += attended[h];
    statistics.bytes_read += totals[h].bytes_read + 2 * attended[h] * d * 2;
  }
  return absl::OkStatus();
}

absl::Status HostZone::Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                               const std::vector<float>& window_lse) {
  if (!config_.measure || zone_.rows() == 0) return absl::OkStatus();
  every_row_.Reset(n, shape_.q_heads, shape_.head_dim);
  AttendAll(layer, q, n, every_row_);
  AddMass(every_row_.lse, zone.lse, window_lse, (*statistics_)[layer.value()]);
  return absl::OkStatus();
}

absl::Status HostZone::MeasureOutput(Layer layer, const float*, int64_t n, const Partial& zone,
                                     const Partial& window) {
  if (!config_.measure || zone_.rows() == 0) return absl::OkStatus();
  AddOutputErrors(window, zone, every_row_, n, shape_, (*statistics_)[layer.value()].output_error);
  return absl::OkStatus();
}

void HostZone::Cancel() {
  selector_->StartSequence();
  std::fill(steps_.begin(), steps_.end(), 0);
}

}  // namespace carrel::decoder
