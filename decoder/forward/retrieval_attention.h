// What:   the attention of decoding: a dense window on this side, retrieved rows of the zone from
//         the store, merged. Plugged into model::Transformer.
// Math:   out = merge(window attention, zone attention): sink, local and new rows are disjoint from
//         the zone, so with every zone row retrieved this is dense attention up to rounding (the
//         master test, tests/master_test.cc).
// Ownership: as OpenedContext.
// Threads: one caller; the pool shares the window's work.
#pragma once

#include <memory>
#include <vector>

#include "common/thread_pool.h"
#include "decoder/forward/sequence_attention.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "decoder/window/window.h"
#include "decoder/zone/opened_context.h"

namespace carrel::decoder {

class ZoneAttention;

class RetrievalAttention final : public SequenceAttention {
 public:
  // Fetches sink and local rows before it returns.
  // windows: of each layer, the newest tokens that count, the one that looks included, or 0 for all;
  // empty: all in every layer. A layer with a window holds those rows itself and asks no store.
  static absl::StatusOr<std::unique_ptr<RetrievalAttention>> Create(
      const OpenedContext& context, std::vector<int64_t> windows = {});
  ~RetrievalAttention() override;

  absl::Status Prefetch(Layer layer, const float* predicted_q, int64_t n) override;
  absl::Status Attend(const model::AttentionInput& input, float* attended) override;
  bool GoesWith(const SequenceAttention& other) const override;
  int64_t most_together() const override { return max_block_; }
  void StartTogether(absl::Span<const SequenceBlock> blocks) override;
  void FinishTogether(absl::Span<const SequenceBlock> blocks) override;

  void set_reading_prompt(bool reading) override;
  void StartSequence(int64_t give_up) override;
  bool KeepSequence(int64_t tokens) override;
  std::vector<float> CopyRows(int64_t tokens) const override { return window_.Copy(tokens); }
  bool RestoreRows(const std::vector<float>& rows, int64_t tokens) override;
  Statistics statistics() const override;
  absl::Status set_trace(QueryTrace* trace) override {
    trace_ = trace;
    return absl::OkStatus();
  }
  void AttendedHere(const QueryTrace& trace, Layer layer,
                    std::vector<AttendedRow>& rows) const override;

 private:
  RetrievalAttention(const OpenedContext& context, std::vector<int64_t> windows);
  int64_t WindowOf(Layer layer) const { return windows_.empty() ? 0 : windows_[layer.value()]; }
  absl::Status LoadContextRows(const OpenedContext& context);
  // A token of a block whose rows are in its window already.
  struct WindowToken {
    RetrievalAttention* attention;
    const model::AttentionInput* input;
    int64_t token;
  };
  // So many tokens look at the rows of a context together; in a layer with a window each has its own.
  int64_t TokensTogether(Layer layer) const;
  static void AddTokens(RetrievalAttention* attention, const model::AttentionInput& input,
                        std::vector<WindowToken>& tokens);
  // Attention of these tokens, over one context, to what their windows hold, into window_partial_ of
  // each: in units of one KV head of some tokens.
  int64_t WindowUnits(absl::Span<const WindowToken> tokens) const;
  void AttendWindow(absl::Span<const WindowToken> tokens, int64_t unit);
  // One token's new rows, one KV head.
  void AttendNewRows(const WindowToken& token, KvHead head);
  void AttendContextRows(absl::Span<const WindowToken> tokens, KvHead head);
  absl::Status AttendWindowAndFinish(const model::AttentionInput& input);
  // Asks for the zone of what the window has attended to already.
  absl::Status AttendZone(const model::AttentionInput& input, float* attended);
  // The zone's (out, lse) [n, q_heads] into window_partial_, which becomes attention over all.
  void MergeZone(const model::AttentionInput& input, const float* out, const float* lse,
                 float* attended);
  absl::Status AskTogether(absl::Span<const SequenceBlock> blocks);

  const AttentionShape shape_;
  const float scale_;
  retrieval::Session* const client_;
  ThreadPool* const pool_;
  const std::vector<int64_t> windows_;
  int64_t max_block_ = 1;  // tokens of one question
  RowRange zone_rows_;     // between the rows that are held
  Position tokens_ = 0;    // of the context
  int64_t given_up_ = 0;   // of its last rows, which are held
  Window window_;
  std::vector<LayerStatistics> layer_statistics_;
  std::unique_ptr<ZoneAttention> zone_;
  Partial window_partial_, zone_partial_;
  std::vector<WindowToken> window_tokens_;
  std::vector<float> together_q_;  // of blocks that go together, in one piece
  absl::Status together_;          // of asking for them
  LayerStatistics before_;         // of the layer, before they were asked for
  QueryTrace* trace_ = nullptr;
};

}  // namespace carrel::decoder
