#include "decoder/runner/repositioned_attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/row_selector.h"
#include "decoder/window/partial.h"
#include "decoder/window/window.h"
#include "decoder/zone/output_error.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/layer/rope/rope_table.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Rows that are turned and attended to at a time: they stay in the L2 cache.
constexpr int64_t kBlockRows = 512;

class Repositioned final : public RepositionedAttention {
 public:
  Repositioned(const OpenedContext& context, const model::ModelConfig& model);
  absl::Status MakeSelector(const OpenedContext& context);

  absl::Status Attend(const model::AttentionInput& input, float* attended) override;
  void set_reading_prompt(bool reading) override { reading_prompt_ = reading; }
  void StartSequence(int64_t give_up) override;
  Statistics statistics() const override;

 private:
  // One KV head of one token of the block; chosen: rows of the zone, null for all of it.
  void AttendToken(const model::AttentionInput& input, KvHead head, int64_t token,
                   const std::vector<Position>* chosen, Partial& partial) const;
  void AttendAll(const model::AttentionInput& input, Partial& partial) const;
  void AttendChosen(const model::AttentionInput& input, Partial& partial);

  const RetrievalConfig config_;
  const AttentionShape shape_;
  const int64_t trained_tokens_;
  const RowRange zone_;
  const std::vector<int64_t> budgets_;
  const kernels::RopeTable rope_;
  const std::shared_ptr<const HostRows> rows_;
  std::unique_ptr<RowSelector> selector_;
  ThreadPool* const pool_;
  int64_t local_ = 0;           // rows of the context behind the zone, but for those given up
  Window new_rows_;             // everything since the context; keys before RoPE
  std::vector<int64_t> steps_;  // [layers]: tokens generated so far
  std::vector<LayerStatistics> layer_statistics_;
  bool reading_prompt_ = false;
  Partial partial_, every_row_;
};

Repositioned::Repositioned(const OpenedContext& context, const model::ModelConfig& model)
    : config_(context.config),
      shape_(model.shape),
      trained_tokens_(model.max_position_embeddings),
      zone_(context.zone),
      budgets_(Budgets(context.selections)),
      rope_(model::RopeInvFreq(model.rope, model.shape.head_dim), trained_tokens_),
      rows_(context.rows),
      pool_(context.pool),
      local_(context.tokens - context.zone.end),
      new_rows_(model.shape),
      steps_(static_cast<size_t>(model.shape.layers)),
      layer_statistics_(StatisticsOf(context.selections)) {}

absl::Status Repositioned::MakeSelector(const OpenedContext& context) {
  ASSIGN_OR_RETURN(selector_,
                   MakeRowSelector(*SelectorOf(config_), shape_, zone_, *rows_, context.pool));
  return absl::OkStatus();
}

void Repositioned::AttendToken(const model::AttentionInput& input, KvHead head, int64_t token,
                               const std::vector<Position>* chosen, Partial& partial) const {
  thread_local std::vector<float> q, k, v, scores, out;
  const int64_t d = shape_.head_dim, group = shape_.group();
  const HeadView& context = rows_->At(input.layer, head);
  const int64_t sink = zone_.begin;
  const int64_t of_zone = chosen == nullptr ? zone_.rows() : static_cast<int64_t>(chosen->size());
  const int64_t of_context = sink + of_zone + local_;
  const int64_t total =
      of_context + new_rows_.rows(input.layer) - input.n + token + 1;  // itself is the last
  const int64_t shared = std::max<int64_t>(0, total - trained_tokens_);
  const int64_t first_q_head = token * shape_.q_heads + head.value() * group;
  q.resize(static_cast<size_t>(group * d));
  for (int64_t h = 0; h < group; ++h) {
    rope_.Turn(input.q + (first_q_head + h) * d, total - 1 - shared,
               &q[static_cast<size_t>(h * d)]);
  }
  k.resize(static_cast<size_t>(kBlockRows * d));
  v.resize(k.size());
  out.resize(static_cast<size_t>(group * (d + 1)));
  scores.resize(static_cast<size_t>(group * kBlockRows));
  for (int64_t first = 0; first < total; first += kBlockRows) {
    const int64_t count = std::min(kBlockRows, total - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t rank = first + i;
      float* key = &k[static_cast<size_t>(i * d)];
      float* value = &v[static_cast<size_t>(i * d)];
      if (rank < of_context) {
        Position row = rank;  // sink
        if (rank >= sink + of_zone) {
          row = zone_.end + (rank - sink - of_zone);
        } else if (rank >= sink && chosen != nullptr) {
          row = (*chosen)[static_cast<size_t>(rank - sink)];
        }
        WidenToFloat(DType::kBf16, context.Key(row), d, key);
        WidenToFloat(DType::kBf16, context.Value(row), d, value);
      } else {
        const int64_t at = (rank - of_context) * d;
        std::copy_n(new_rows_.k(input.layer, head) + at, d, key);
        std::copy_n(new_rows_.v(input.layer, head) + at, d, value);
      }
      rope_.Turn(key, std::max<int64_t>(0, rank - shared), key);
    }
    auto params = kernels::OfHeads<kernels::WindowAttentionParams>(shape_);
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.rows = count;
    params.out = out.data();
    params.lse = out.data() + group * d;
    kernels::WindowAttention(params, scores.data());
    partial.Merge(shape_, token, head, out.data());
  }
}

void Repositioned::AttendAll(const model::AttentionInput& input, Partial& partial) const {
  partial.Reset(input.n, shape_);
  pool_->ParallelFor(input.n * shape_.kv_heads, [&](int64_t unit) {
    AttendToken(input, KvHead(static_cast<int32_t>(unit % shape_.kv_heads)), unit / shape_.kv_heads,
                nullptr, partial);
  });
}

void Repositioned::AttendChosen(const model::AttentionInput& input, Partial& partial) {
  partial.Reset(input.n, shape_);
  const int64_t d = shape_.head_dim, group = shape_.group();
  const int64_t block = reading_prompt_ ? selector_->block_tokens() : 1;
  int64_t& step = steps_[static_cast<size_t>(input.layer.value())];
  if (reading_prompt_) step = 0;
  const int64_t rows_before = new_rows_.rows(input.layer) - input.n;
  std::vector<SelectedRows> totals(static_cast<size_t>(shape_.kv_heads));
  std::vector<int64_t> attended(totals.size());
  pool_->ParallelFor(shape_.kv_heads, [&](int64_t h) {
    const KvHead head(static_cast<int32_t>(h));
    thread_local std::vector<float> queries;
    SelectedRows& selection = totals[static_cast<size_t>(h)];
    for (int64_t first = 0; first < input.n; first += block) {
      const int64_t tokens = std::min(block, input.n - first);
      queries.clear();
      for (int64_t i = first; i < first + tokens; ++i) {
        const float* of_token = input.q + (i * shape_.q_heads + h * group) * d;
        queries.insert(queries.end(), of_token, of_token + group * d);
      }
      KeyPlacement placement;
      placement.rope = &rope_;
      placement.stream = local_ + rows_before + first + 1;
      placement.chunk_indexed = input.layer.value() < model::kChunkIndexedLayers;
      SelectRequest request;
      request.layer = input.layer;
      request.head = head;
      request.q = queries.data();
      request.queries = tokens * group;
      request.budget = budgets_[static_cast<size_t>(input.layer.value())];
      request.step = reading_prompt_ ? kPromptStep : step + first;
      request.placement = &placement;
      selector_->Select(request, selection);
      for (int64_t i = first; i < first + tokens; ++i) {
        AttendToken(input, head, i, &selection.rows, partial);
      }
      attended[static_cast<size_t>(h)] += tokens * static_cast<int64_t>(selection.rows.size());
    }
  });
  if (!reading_prompt_) step += input.n;
  LayerStatistics& statistics = layer_statistics_[static_cast<size_t>(input.layer.value())];
  for (size_t h = 0; h < totals.size(); ++h) {
    statistics.candidates += totals[h].keys_scored;
    statistics.visited += totals[h].visited * group;
    statistics.rows_attended += attended[h];
    statistics.bytes_read += totals[h].bytes_read + 2 * attended[h] * d * 2;
  }
}

absl::Status Repositioned::Attend(const model::AttentionInput& input, float* attended) {
  LayerStatistics& statistics = layer_statistics_[static_cast<size_t>(input.layer.value())];
  statistics.tokens += input.n;
  new_rows_.Append(input.layer, input.k, input.v, input.n);
  const bool all = budgets_[static_cast<size_t>(input.layer.value())] == kAllRows;
  if (all) {
    AttendAll(input, partial_);
    const int64_t rows = zone_.rows() * shape_.kv_heads * input.n;
    statistics.rows_attended += rows;
    statistics.candidates += rows;
    statistics.bytes_read += 2 * rows * shape_.head_dim * 2;
  } else {
    AttendChosen(input, partial_);
  }
  if (config_.measure) {
    if (!all) AttendAll(input, every_row_);
    Partial nothing;
    nothing.Reset(input.n, shape_);
    AddOutputErrors(nothing, partial_, all ? partial_ : every_row_, input.n, shape_,
                    statistics.output_error);
  }
  std::copy(partial_.out.begin(), partial_.out.end(), attended);
  return absl::OkStatus();
}

void Repositioned::StartSequence(int64_t give_up) {
  local_ = rows_->tokens() - zone_.end - give_up;
  selector_->StartSequence();
  new_rows_.Truncate();
  std::fill(steps_.begin(), steps_.end(), 0);
}

Statistics Repositioned::statistics() const {
  Statistics statistics;
  statistics.layers = layer_statistics_;
  statistics.window_bytes = new_rows_.bytes();
  return statistics;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RepositionedAttention>> RepositionedAttention::Create(
    const OpenedContext& context, const model::ModelConfig& model) {
  CARREL_CHECK(SelectorOf(context.config) != nullptr && context.config.rope == Rope::kInfiniteHip &&
               context.rows != nullptr);
  auto attention = std::make_unique<Repositioned>(context, model);
  RETURN_IF_ERROR(attention->MakeSelector(context));
  return attention;
}

}  // namespace carrel::decoder
