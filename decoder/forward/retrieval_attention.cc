#include "decoder/forward/retrieval_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "decoder/client/context_rows.h"
#include "decoder/zone/make_zone.h"
#include "decoder/zone/zone_attention.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/window_attention/window_attention.h"

namespace carrel::decoder {

RetrievalAttention::RetrievalAttention(const OpenedContext& context, std::vector<int64_t> windows)
    : shape_(context.shape),
      scale_(1.0f / std::sqrt(static_cast<float>(shape_.head_dim))),
      client_(context.client),
      pool_(context.pool),
      windows_(std::move(windows)),
      window_(shape_),
      layer_statistics_(shape_.layers) {}

RetrievalAttention::~RetrievalAttention() = default;

absl::StatusOr<std::unique_ptr<RetrievalAttention>> RetrievalAttention::Create(
    const OpenedContext& context, std::vector<int64_t> windows) {
  std::unique_ptr<RetrievalAttention> attention(
      new RetrievalAttention(context, std::move(windows)));
  attention->zone_rows_ = context.zone;
  attention->tokens_ = context.tokens;
  attention->max_block_ = context.max_block;
  ASSIGN_OR_RETURN(attention->zone_, MakeZone(context, &attention->layer_statistics_));
  RETURN_IF_ERROR(Annotate(attention->LoadContextRows(context), "reading sink and local rows"));
  return attention;
}

absl::Status RetrievalAttention::LoadContextRows(const OpenedContext& context) {
  const RowRange ranges[] = {{0, context.zone.begin}, {context.zone.end, context.tokens}};
  RowRange newest;  // of a layer with a window: what its first new token sees
  const auto ranges_of = [&](Layer layer) -> absl::Span<const RowRange> {
    const int64_t window = WindowOf(layer);
    if (window == 0) return ranges;
    newest = {std::max<Position>(0, context.tokens - (window - 1)), context.tokens};
    return {&newest, 1};
  };
  return ReadContextRows(
      client_, shape_, ranges_of, context.max_fetch_rows, [&](const ContextRows& block) {
        window_.AddContextRows(block.layer, block.head, block.k, block.v, block.rows);
        return absl::OkStatus();
      });
}

absl::Status RetrievalAttention::Prefetch(Layer layer, const float* predicted_q, int64_t n) {
  if (WindowOf(layer) > 0) return absl::OkStatus();
  return zone_->Prefetch(layer, predicted_q, n);
}

void RetrievalAttention::AttendWindow(const model::AttentionInput& input) {
  window_partial_.Reset(input.n, shape_.q_heads, shape_.head_dim);
  pool_->ParallelFor(input.n * shape_.kv_heads, [&](int64_t unit) {
    AttendWindow(input, unit / shape_.kv_heads,
                 KvHead(static_cast<int32_t>(unit % shape_.kv_heads)));
  });
}

// Side by side: KV heads are few, and whoever has no head of the zone to look at has the window's.
absl::Status RetrievalAttention::AttendWindowAndFinish(const model::AttentionInput& input) {
  window_partial_.Reset(input.n, shape_.q_heads, shape_.head_dim);
  const int64_t units = input.n * shape_.kv_heads;
  const int64_t zone_unit =
      pool_->threads() > 0 ? 0 : units;  // alone: last, its answer is on its way
  absl::Status status;
  pool_->ParallelFor(units + 1, [&](int64_t i) {
    if (i == zone_unit) {
      status = zone_->Finish(input.layer, input.q, input.n, zone_partial_);
      return;
    }
    const int64_t unit = i < zone_unit ? i : i - 1;
    AttendWindow(input, unit / shape_.kv_heads,
                 KvHead(static_cast<int32_t>(unit % shape_.kv_heads)));
  });
  return status;
}

void RetrievalAttention::AttendWindow(const model::AttentionInput& input, int64_t token,
                                      KvHead head) {
  thread_local std::vector<float> scratch;
  const int64_t d = shape_.head_dim, group = shape_.group();
  const int64_t rows_before = window_.rows(input.layer) - input.n;
  const int64_t window = WindowOf(input.layer);
  const int64_t first_q_head = token * shape_.q_heads + head.value() * group;
  kernels::WindowAttentionParams params;
  params.q = input.q + first_q_head * d;
  params.group = group;
  params.rows = rows_before + token + 1;  // what comes before the token, and itself
  const int64_t skipped = window > 0 ? std::max<int64_t>(0, params.rows - window) : 0;
  params.k = window_.k(input.layer, head) + skipped * d;
  params.v = window_.v(input.layer, head) + skipped * d;
  params.rows -= skipped;
  params.head_dim = d;
  params.scale = scale_;
  params.out = &window_partial_.out[first_q_head * d];
  params.lse = &window_partial_.lse[first_q_head];
  scratch.resize(static_cast<size_t>(group * params.rows));
  kernels::WindowAttention(params, scratch.data());
}

absl::Status RetrievalAttention::AttendZone(const model::AttentionInput& input, float* attended) {
  RETURN_IF_ERROR(zone_->Start(input.layer, input.q, input.n));
  RETURN_IF_ERROR(zone_->Finish(input.layer, input.q, input.n, zone_partial_));
  MergeZone(input, zone_partial_.out.data(), zone_partial_.lse.data(), attended);
  return absl::OkStatus();
}

absl::Status RetrievalAttention::Attend(const model::AttentionInput& input, float* attended) {
  if (WindowOf(input.layer) > 0) {
    window_.Append(input.layer, input.k, input.v, input.n);
    AttendWindow(input);
    std::copy(window_partial_.out.begin(), window_partial_.out.end(), attended);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(
      zone_->Start(input.layer, input.q, input.n));  // on its way while the window is computed
  window_.Append(input.layer, input.k, input.v, input.n);
  RETURN_IF_ERROR(AttendWindowAndFinish(input));
  RETURN_IF_ERROR(
      zone_->Measure(input.layer, input.q, input.n, zone_partial_, window_partial_.lse));
  RETURN_IF_ERROR(
      zone_->MeasureOutput(input.layer, input.q, input.n, zone_partial_, window_partial_));
  MergeZone(input, zone_partial_.out.data(), zone_partial_.lse.data(), attended);
  return absl::OkStatus();
}

void RetrievalAttention::MergeZone(const model::AttentionInput& input, const float* out,
                                   const float* lse, float* attended) {
  kernels::MergeStates(window_partial_.out.data(), window_partial_.lse.data(), out, lse,
                       input.n * shape_.q_heads, shape_.head_dim);
  if (trace_ != nullptr) {
    trace_->Add(input.layer, input.q, window_partial_.lse.data(), input.n);
  }
  std::copy(window_partial_.out.begin(), window_partial_.out.end(), attended);
}

bool RetrievalAttention::GoesWith(const SequenceAttention& other) const {
  const auto* one = dynamic_cast<const RetrievalAttention*>(&other);
  return one != nullptr && windows_ == one->windows_ && zone_->AsksAs(*one->zone_);
}

void RetrievalAttention::StartTogether(absl::Span<const SequenceBlock> blocks) {
  const Layer layer = blocks[0].input.layer;
  if (blocks.size() == 1 || WindowOf(layer) > 0) return;
  const int64_t width = int64_t{shape_.q_heads} * shape_.head_dim;
  together_q_.clear();
  for (const SequenceBlock& one : blocks) {
    together_q_.insert(together_q_.end(), one.input.q, one.input.q + one.input.n * width);
  }
  before_ = layer_statistics_[static_cast<size_t>(layer.value())];
  together_ =
      zone_->Start(layer, together_q_.data(), static_cast<int64_t>(together_q_.size()) / width);
}

// Into zone_partial_, and into everybody's statistics.
absl::Status RetrievalAttention::AskTogether(absl::Span<const SequenceBlock> blocks) {
  const Layer layer = blocks[0].input.layer;
  RETURN_IF_ERROR(together_);
  std::vector<CountShare> all;
  int64_t tokens = 0;
  for (const SequenceBlock& one : blocks) {
    auto& attention = static_cast<RetrievalAttention&>(*one.attention);
    all.push_back({&attention.layer_statistics_[static_cast<size_t>(layer.value())], one.input.n});
    tokens += one.input.n;
  }
  RETURN_IF_ERROR(zone_->Finish(layer, together_q_.data(), tokens, zone_partial_));
  ShareCounts(before_, all);
  return absl::OkStatus();
}

void RetrievalAttention::FinishTogether(absl::Span<const SequenceBlock> blocks) {
  const Layer layer = blocks[0].input.layer;
  if (blocks.size() == 1 || WindowOf(layer) > 0) return SequenceAttention::FinishTogether(blocks);
  const int64_t d = shape_.head_dim;
  const auto attention_of = [](const SequenceBlock& one) -> RetrievalAttention& {
    return static_cast<RetrievalAttention&>(*one.attention);
  };
  std::vector<std::pair<const SequenceBlock*, int64_t>> tokens;  // whose, and which of its block
  for (const SequenceBlock& one : blocks) {
    attention_of(one).window_.Append(layer, one.input.k, one.input.v, one.input.n);
    attention_of(one).window_partial_.Reset(one.input.n, shape_.q_heads, d);
    for (int64_t i = 0; i < one.input.n; ++i) tokens.emplace_back(&one, i);
  }
  pool_->ParallelFor(static_cast<int64_t>(tokens.size()) * shape_.kv_heads, [&](int64_t unit) {
    const auto& [block, token] = tokens[static_cast<size_t>(unit / shape_.kv_heads)];
    attention_of(*block).AttendWindow(block->input, token,
                                      KvHead(static_cast<int32_t>(unit % shape_.kv_heads)));
  });
  if (!AskTogether(blocks).ok()) {
    zone_->Cancel();
    layer_statistics_[static_cast<size_t>(layer.value())] = before_;
    for (const SequenceBlock& one : blocks) {
      *one.status = attention_of(one).AttendZone(one.input, one.attended);
    }
    return;
  }
  int64_t at = 0;  // q heads
  for (const SequenceBlock& one : blocks) {
    attention_of(one).MergeZone(one.input, &zone_partial_.out[static_cast<size_t>(at * d)],
                                &zone_partial_.lse[static_cast<size_t>(at)], one.attended);
    *one.status = absl::OkStatus();
    at += one.input.n * shape_.q_heads;
  }
}

void RetrievalAttention::set_reading_prompt(bool reading) { zone_->set_reading_prompt(reading); }

void RetrievalAttention::StartSequence() {
  zone_->Cancel();
  window_.Truncate();
}

bool RetrievalAttention::KeepSequence(int64_t tokens) {
  zone_->Cancel();
  window_.Truncate(tokens);
  return true;
}

bool RetrievalAttention::RestoreRows(const std::vector<float>& rows, int64_t tokens) {
  zone_->Cancel();
  return window_.Restore(rows, tokens);
}

void RetrievalAttention::AttendedHere(const QueryTrace& trace, Layer layer,
                                      std::vector<AttendedRow>& rows) const {
  if (WindowOf(layer) > 0) return;  // such a layer looks at the newest rows alone
  for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
    decoder::AttendedHere(trace, layer, head, shape_, zone_rows_.end, tokens_ - zone_rows_.end,
                          window_.k(layer, head) + zone_rows_.begin * shape_.head_dim, rows);
  }
}

Statistics RetrievalAttention::statistics() const {
  Statistics statistics;
  statistics.layers = layer_statistics_;
  if (client_ != nullptr) {
    statistics.bytes_sent = client_->bytes_sent();
    statistics.bytes_received = client_->bytes_received();
  }
  statistics.window_bytes = window_.bytes();
  return statistics;
}

}  // namespace carrel::decoder
