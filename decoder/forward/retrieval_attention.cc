#include "decoder/forward/retrieval_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/dtype.h"
#include "common/status.h"
#include "decoder/client/context_rows.h"
#include "decoder/zone/make_zone.h"
#include "decoder/zone/zone_attention.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/window_attention/window_attention.h"

namespace carrel::decoder {
namespace {

// Tokens whose queries stay in the L1 cache beside the rows that they look at together.
constexpr int64_t kTokensTogether = 8;

}  // namespace

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
  RowRange newest;  // of a layer with a window: what its first new token may see
  const auto ranges_of = [&](Layer layer) -> absl::Span<const RowRange> {
    const int64_t window = WindowOf(layer);
    if (window == 0) return ranges;
    newest = {std::max<Position>(0, context.tokens - (window - 1) - kMostGivenUp), context.tokens};
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

int64_t RetrievalAttention::TokensTogether(Layer layer) const {
  return WindowOf(layer) > 0 ? 1 : kTokensTogether;
}

void RetrievalAttention::AddTokens(RetrievalAttention* attention,
                                   const model::AttentionInput& input,
                                   std::vector<WindowToken>& tokens) {
  attention->window_partial_.Reset(input.n, attention->shape_.q_heads, attention->shape_.head_dim);
  for (int64_t i = 0; i < input.n; ++i) tokens.push_back({attention, &input, i});
}

int64_t RetrievalAttention::WindowUnits(absl::Span<const WindowToken> tokens) const {
  const int64_t together = TokensTogether(tokens[0].input->layer);
  return (static_cast<int64_t>(tokens.size()) + together - 1) / together * shape_.kv_heads;
}

void RetrievalAttention::AttendWindow(absl::Span<const WindowToken> tokens, int64_t unit) {
  const int64_t together = TokensTogether(tokens[0].input->layer);
  const KvHead head(static_cast<int32_t>(unit % shape_.kv_heads));
  tokens = tokens.subspan(static_cast<size_t>(unit / shape_.kv_heads * together),
                          static_cast<size_t>(together));
  for (const WindowToken& token : tokens) token.attention->AttendNewRows(token, head);
  AttendContextRows(tokens, head);
}

void RetrievalAttention::AttendNewRows(const WindowToken& one, KvHead head) {
  thread_local std::vector<float> scratch;
  const model::AttentionInput& input = *one.input;
  const int64_t d = shape_.head_dim, group = shape_.group();
  const int64_t first_q_head = one.token * shape_.q_heads + head.value() * group;
  // What comes before the token, and itself.
  const int64_t end = window_.rows(input.layer) - input.n + one.token + 1;
  const int64_t window = WindowOf(input.layer);
  const int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : 0;
  kernels::WindowAttentionParams params;
  params.q = input.q + first_q_head * d;
  params.group = group;
  params.rows = end - begin;
  params.k = window_.k(input.layer, head) + begin * d;
  params.v = window_.v(input.layer, head) + begin * d;
  params.head_dim = d;
  params.scale = scale_;
  params.out = &window_partial_.out[static_cast<size_t>(first_q_head * d)];
  params.lse = &window_partial_.lse[static_cast<size_t>(first_q_head)];
  scratch.resize(static_cast<size_t>(group * params.rows));
  kernels::WindowAttention(params, scratch.data());
}

// All have the same rows: they are read from memory once.
void RetrievalAttention::AttendContextRows(absl::Span<const WindowToken> tokens, KvHead head) {
  thread_local std::vector<float> queries, out, lse, scratch;
  const Layer layer = tokens[0].input->layer;
  const int64_t d = shape_.head_dim, group = shape_.group();
  const int64_t vectors = static_cast<int64_t>(tokens.size()) * group;
  const int64_t end = window_.context_rows(layer) - given_up_, window = WindowOf(layer);
  int64_t begin = 0;
  if (window > 0) {  // one token
    const int64_t new_rows = window_.rows(layer) - tokens[0].input->n + tokens[0].token + 1;
    begin = std::clamp<int64_t>(end + new_rows - window, 0, end);
  }
  const auto q_head = [&](const WindowToken& one) {
    return one.token * shape_.q_heads + head.value() * group;
  };
  queries.clear();
  for (const WindowToken& one : tokens) {
    const float* const q = one.input->q + q_head(one) * d;
    queries.insert(queries.end(), q, q + group * d);
  }
  out.resize(static_cast<size_t>(vectors * d));
  lse.resize(static_cast<size_t>(vectors));
  kernels::WindowAttentionParams params;
  params.q = queries.data();
  params.group = vectors;
  params.rows = end - begin;
  params.k = window_.context_k(layer, head) + begin * d;
  params.v = window_.context_v(layer, head) + begin * d;
  params.bf16 = true;
  params.head_dim = d;
  params.scale = scale_;
  params.out = out.data();
  params.lse = lse.data();
  scratch.resize(static_cast<size_t>(vectors * params.rows));
  kernels::WindowAttention(params, scratch.data());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto first = static_cast<int64_t>(i) * group;
    tokens[i].attention->window_partial_.Merge(tokens[i].token, shape_.q_heads,
                                               head.value() * group, group, d,
                                               out.data() + first * d, lse.data() + first);
  }
}

// Side by side: KV heads are few, and whoever has no head of the zone to look at has the window's.
absl::Status RetrievalAttention::AttendWindowAndFinish(const model::AttentionInput& input) {
  window_tokens_.clear();
  AddTokens(this, input, window_tokens_);
  const int64_t units = WindowUnits(window_tokens_);
  const int64_t zone_unit =
      pool_->threads() > 0 ? 0 : units;  // alone: last, its answer is on its way
  absl::Status status;
  pool_->ParallelFor(units + 1, [&](int64_t i) {
    if (i == zone_unit) {
      status = zone_->Finish(input.layer, input.q, input.n, zone_partial_);
      return;
    }
    AttendWindow(window_tokens_, i < zone_unit ? i : i - 1);
  });
  return status;
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
    window_tokens_.clear();
    AddTokens(this, input, window_tokens_);
    pool_->ParallelFor(WindowUnits(window_tokens_),
                       [&](int64_t unit) { AttendWindow(window_tokens_, unit); });
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
  return one != nullptr && windows_ == one->windows_ && given_up_ == one->given_up_ &&
         zone_->AsksAs(*one->zone_);
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
  window_tokens_.clear();
  for (const SequenceBlock& one : blocks) {
    attention_of(one).window_.Append(layer, one.input.k, one.input.v, one.input.n);
    AddTokens(&attention_of(one), one.input, window_tokens_);
  }
  pool_->ParallelFor(WindowUnits(window_tokens_),
                     [&](int64_t unit) { AttendWindow(window_tokens_, unit); });
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

void RetrievalAttention::StartSequence(int64_t give_up) {
  zone_->Cancel();
  given_up_ = give_up;
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
  const int64_t local = std::max<int64_t>(0, tokens_ - zone_rows_.end - given_up_);
  const int64_t d = shape_.head_dim;
  std::vector<float> keys(static_cast<size_t>(local * d));
  for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
    WidenToFloat(DType::kBf16, window_.context_k(layer, head) + zone_rows_.begin * d, local * d,
                 keys.data());
    decoder::AttendedHere(trace, layer, head, shape_, zone_rows_.end, local, keys.data(), rows);
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
