// What:   the zone in this host's memory where a method chooses its rows (but for exact, which a session
//         answers, store_zone.cc): they are attended here.
// Math:   dense layers attend to every row of the zone, the others to what the selector selects
//         within the layer's budget; the partial attention is merged with the window's as the
//         store's is. A budget that covers the zone makes a layer dense.
//         Rows that were not selected count through the context's summaries, as at the store
//         (config.estimate).
// Source: decisions 017, 020.
// Errors: NotFound what the selector needs and the context lacks; FailedPrecondition estimate=on
//         without summaries; DataLoss damaged summaries.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "common/status.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/row_selector.h"
#include "decoder/zone/make_zone.h"
#include "decoder/zone/quality.h"
#include "decoder/zone/repositioned_attention.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/attention/sparse_attention/sparse_spans.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Rows of a head that are attended to at a time where all are: so few that each core has a part, not so
// many parts that merging them tells.
constexpr int64_t kSpanRows = 512, kMostSpans = 64;

// The cut depends on the zone alone.
std::vector<RowRange> SpansOf(RowRange zone) {
  const int64_t spans = std::min(kMostSpans, (zone.rows() + kSpanRows - 1) / kSpanRows);
  std::vector<RowRange> all;
  for (int64_t i = 0; i < spans; ++i) {
    all.push_back(
        {zone.begin + zone.rows() * i / spans, zone.begin + zone.rows() * (i + 1) / spans});
  }
  return all;
}

// A context's rows as if every q head had a KV head of its own: what mask=q-head chooses from and attends to. Q head h
// reads the rows of KV head h / group. Nothing here estimates the rest: what no q head of a group chose is another
// set for each.
class QHeadRows final : public HostRows {
 public:
  QHeadRows(std::shared_ptr<const HostRows> rows, int64_t group)
      : rows_(std::move(rows)), group_(static_cast<int32_t>(group)) {}

  absl::Status CheckUnchanged() const override { return rows_->CheckUnchanged(); }
  int64_t tokens() const override { return rows_->tokens(); }
  const HeadView& At(Layer layer, KvHead q_head) const override {
    return rows_->At(layer, KvHead(q_head.value() / group_));
  }
  absl::StatusOr<std::vector<float>> SampledQueries(Layer, KvHead) const override {
    return absl::FailedPreconditionError("rows per q head calibrate nothing");
  }
  absl::StatusOr<HeadCodes> StoredCodes(Layer, KvHead) const override {
    return absl::FailedPreconditionError("rows per q head have no codes");
  }

 private:
  const std::shared_ptr<const HostRows> rows_;
  const int32_t group_;
};

class HostZone final : public ZoneAttention {
 public:
  HostZone(const OpenedContext& context, std::unique_ptr<RowSelector> selector,
           std::unique_ptr<RepositionedAttention> positions)
      : ZoneAttention(context),
        rows_(*context_.rows),
        positions_(std::move(positions)),
        empty_(zone_.rows() == 0 && positions_ == nullptr),
        estimate_(config_.estimate != Estimate::kOff && rows_.has_summaries()),
        prompt_takes_all_(positions_ == nullptr && PromptTakesAll(config_, context_.device)),
        selector_(std::move(selector)),
        steps_(static_cast<size_t>(shape_.layers)),
        selected_(static_cast<size_t>(shape_.kv_heads)) {}

  absl::Status Start(Layer layer, const float*, int64_t n) override {
    statistics_of(layer).tokens += n;
    return absl::OkStatus();
  }

  absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) override {
    partial.Reset(n, shape_);
    if (empty_) return absl::OkStatus();
    const auto at = static_cast<size_t>(layer.value());
    const bool whole_prompt = reading_prompt_ && prompt_takes_all_;
    if (!whole_prompt && !select::IsAll(context_.selections[at]))
      return AttendSelected(layer, q, n, partial);
    AttendAll(layer, q, n, partial);
    LayerStatistics& statistics = statistics_of(layer);
    const int64_t rows = zone_.rows() * shape_.kv_heads * n;
    if (whole_prompt) {
      steps_[at] = 0;
      statistics.whole_tokens += n;
      statistics.whole_rows += rows;
    }
    statistics.rows_attended += rows;
    statistics.candidates += rows;
    statistics.bytes_read += 2 * rows * shape_.head_dim * 2;
    return absl::OkStatus();
  }

  absl::Status Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                       const Partial& window) override {
    if (!config_.measure || empty_) return absl::OkStatus();
    Partial every_row;
    every_row.Reset(n, shape_);
    AttendAll(layer, q, n, every_row);
    if (positions_ == nullptr) AddMass(every_row.lse, zone.lse, window.lse, statistics_of(layer));
    AddOutputErrors(window, zone, every_row, n, shape_, statistics_of(layer).output_error);
    return absl::OkStatus();
  }

  void Cancel() override {
    selector_->StartSequence();
    std::fill(steps_.begin(), steps_.end(), 0);
  }

 private:
  // Spans of a token and head are merged in order.
  void AttendAll(Layer layer, const float* q, int64_t n, Partial& partial) const {
    const int64_t heads = shape_.kv_heads, group = shape_.group(), d = shape_.head_dim;
    const std::vector<RowRange> spans = SpansOf(zone_);
    const auto count = static_cast<int64_t>(spans.size());
    const int64_t floats = group * (d + 1);
    pool_->ParallelForOfLoops(n * heads, [&](int64_t unit) {
      const int64_t token = unit / heads;
      const KvHead head(static_cast<int32_t>(unit % heads));
      if (positions_ != nullptr)
        return positions_->Attend(layer, head, q, n, token, nullptr, partial);
      const float* const queries = q + (token * shape_.q_heads + head.value() * group) * d;
      const auto states =
          std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count * floats));
      pool_->ParallelFor(count, [&](int64_t i) {
        thread_local std::vector<const void*> k, v;
        const HeadView& of_head = rows_.At(layer, head);
        const RowRange& span = spans[static_cast<size_t>(i)];
        k.clear();
        v.clear();
        for (Position row = span.begin; row < span.end; ++row) {
          k.push_back(of_head.Key(row));
          v.push_back(of_head.Value(row));
        }
        AttendRows(shape_, queries, k, v, states.get() + i * floats);
      });
      for (int64_t i = 0; i < count; ++i)
        partial.Merge(shape_, token, head, states.get() + i * floats);
    });
  }

  absl::Status AttendSelected(Layer layer, const float* q, int64_t n, Partial& partial) {
    const int64_t d = shape_.head_dim, group = shape_.group();
    const int64_t block = reading_prompt_ ? selector_->block_tokens() : 1;
    int64_t& step = steps_[static_cast<size_t>(layer.value())];
    if (reading_prompt_) step = 0;
    const auto& top_k =
        std::get<select::TopK>(context_.selections[static_cast<size_t>(layer.value())]);
    std::vector<int64_t> attended(selected_.size());
    std::vector<absl::Status> statuses(selected_.size());
    pool_->ParallelFor(shape_.kv_heads, [&](int64_t h) {
      const KvHead head(static_cast<int32_t>(h));
      thread_local std::vector<float> queries;
      SelectedRows& selection = selected_[static_cast<size_t>(h)];
      selection.visited = selection.keys_scored = selection.bytes_read = 0;
      for (int64_t first = 0; first < n; first += block) {
        const int64_t tokens = std::min(block, n - first);
        queries.clear();
        for (int64_t i = first; i < first + tokens; ++i) {
          const float* of_token = q + (i * shape_.q_heads + h * group) * d;
          queries.insert(queries.end(), of_token, of_token + group * d);
        }
        SelectRequest request = {.layer = layer, .head = head, .q = queries.data()};
        request.queries = tokens * group;
        request.budget = positions_ != nullptr ? top_k.rows : top_k.Of(head);
        request.step = reading_prompt_ ? kPromptStep : step + first;
        KeyPlacement placement;
        if (positions_ != nullptr) {
          placement = positions_->PlacementOf(layer, n, first);
          request.placement = &placement;
        }
        selection.bound.clear();
        selector_->Select(request, selection);
        for (int64_t i = first; i < first + tokens; ++i) {
          if (positions_ != nullptr) {
            positions_->Attend(layer, head, q, n, i, &selection.rows, partial);
            continue;
          }
          const float* bound = selection.bound.empty()
                                   ? nullptr
                                   : &selection.bound[static_cast<size_t>((i - first) * group)];
          statuses[static_cast<size_t>(h)].Update(
              AttendChosen(layer, head, q, i, selection.rows, bound, partial));
        }
        attended[static_cast<size_t>(h)] += tokens * static_cast<int64_t>(selection.rows.size());
      }
    });
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
    if (!reading_prompt_) step += n;
    LayerStatistics& statistics = statistics_of(layer);
    statistics.estimated = estimate_;
    for (size_t h = 0; h < selected_.size(); ++h) {
      statistics.candidates += selected_[h].keys_scored;
      statistics.visited += selected_[h].visited * group;
      statistics.rows_attended += attended[h];
      statistics.bytes_read += selected_[h].bytes_read + 2 * attended[h] * d * 2;
    }
    return absl::OkStatus();
  }

  // One KV head of one token. bound: of the group, or null.
  absl::Status AttendChosen(Layer layer, KvHead head, const float* q, int64_t token,
                            const std::vector<Position>& rows, const float* bound,
                            Partial& partial) const {
    thread_local std::vector<const void*> k, v;
    thread_local std::vector<float> scores, states;
    const int64_t d = shape_.head_dim, group = shape_.group();
    const HeadView& of_head = rows_.At(layer, head);
    k.resize(rows.size());
    v.resize(rows.size());
    scores.resize(static_cast<size_t>(group) * rows.size());
    const int64_t q_head = token * shape_.q_heads + head.value() * group;
    auto params = kernels::OfHeads<kernels::SparseAttentionParams>(shape_);
    params.q = q + q_head * d;
    params.rows = static_cast<int64_t>(rows.size());
    params.k = k.data();
    params.v = v.data();
    params.scores = scores.data();
    params.out = &partial.out[static_cast<size_t>(q_head * d)];  // which nobody else merges into
    params.lse = &partial.lse[static_cast<size_t>(q_head)];
    const int64_t floats = group * (d + 1);
    states.resize(static_cast<size_t>(floats + kernels::SparseSpanFloats(params)));
    float* const rest = states.data();
    pool_->ParallelFor(
        kernels::SparseSpans(params.rows), [&, k_rows = k.data(), v_rows = v.data()](int64_t span) {
          const int64_t end = kernels::SparseSpanBegin(params.rows, span + 1);
          for (int64_t j = kernels::SparseSpanBegin(params.rows, span); j < end; ++j) {
            const Position row = rows[static_cast<size_t>(j)];
            k_rows[j] = of_head.Key(row);
            v_rows[j] = of_head.Value(row);
          }
          kernels::SparseAttentionSpan(params, span, rest + floats);
        });
    kernels::MergeSparseSpans(params, rest + floats);
    if (!estimate_ || params.rows == zone_.rows()) return absl::OkStatus();
    RETURN_IF_ERROR(rows_.EstimateRest(layer, head,
                                       {.queries = params.q,
                                        .group = group,
                                        .scale = params.scale,
                                        .zone = zone_,
                                        .selected = rows,
                                        .scores = params.scores,
                                        .bound = bound,
                                        .pool = pool_,
                                        .out = rest,
                                        .lse = rest + group * d}));
    partial.Merge(shape_, token, head, rest);
    return absl::OkStatus();
  }

  const HostRows& rows_;
  const std::unique_ptr<RepositionedAttention> positions_;  // null: rows stand at their own
  const bool empty_;                                        // there is nothing to attend to
  const bool estimate_, prompt_takes_all_;
  const std::unique_ptr<RowSelector> selector_;
  std::vector<int64_t> steps_;          // [layers]: tokens generated so far
  std::vector<SelectedRows> selected_;  // [kv_heads], of the layer attended to last
};

}  // namespace

absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeHostZone(
    const HostZoneOptions& options, const OpenedContext& context,
    std::unique_ptr<RepositionedAttention> positions) {
  const RetrievalConfig& config = context.config;
  CARREL_CHECK(context.rows != nullptr);
  if (config.estimate == Estimate::kOn && !context.rows->has_summaries()) {
    return absl::FailedPreconditionError(
        "estimate=on: the context has no summaries; carrel reindex --summaries 40 makes them");
  }
  OpenedContext heads = context;
  if (options.selector.mask == SelectorMask::kQHead) {
    heads.shape.kv_heads = context.shape.q_heads;
    heads.rows = std::make_shared<QHeadRows>(context.rows, context.shape.group());
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<RowSelector> selector,
      MakeRowSelector(options.selector, heads.shape, heads.zone, *heads.rows, heads.pool));
  return std::make_unique<HostZone>(heads, std::move(selector), std::move(positions));
}

}  // namespace carrel::decoder
