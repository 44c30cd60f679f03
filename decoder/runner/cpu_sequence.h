// What:   a sequence on the CPU: a dense window of the rows that are held here, and the zone, wherever it
//         lives; or a zone that gives positions and attends to both (repositioned_attention.h).
// Errors: Open: those of the zone; what the store answers.
// Ownership: as runner.h.
// Threads: one; the pool shares the work of its window and zone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "decoder/runner/query_drift.h"
#include "decoder/runner/runner.h"
#include "decoder/window/window.h"
#include "decoder/zone/zone_attention.h"
#include "model/config.h"

namespace carrel::decoder {

class CpuSequence final : public Sequence {
 public:
  // Fetches sink and local rows before it returns.
  static absl::StatusOr<std::unique_ptr<CpuSequence>> Open(const model::ModelConfig& model,
                                                           const OpenedContext& context,
                                                           std::shared_ptr<Runner> runner);

  Runner& runner() override { return *runner_; }
  CpuSequence* on_cpu() override { return this; }
  Statistics statistics() const override;
  absl::Status set_trace(QueryTrace* trace) override;
  void AttendedHere(const QueryTrace& trace, Layer layer,
                    std::vector<AttendedRow>& rows) const override;

  // Of a step.
  void Begin(const Slice& slice);
  // Of the newest tokens that count in a layer, the one that looks included; 0: all. A layer with a window
  // holds these rows itself, and has no zone.
  int64_t WindowOf(Layer layer) const { return windows_.empty() ? 0 : windows_[layer.value()]; }
  // Whether queries of the layer are asked ahead, and the asking; predicted_q [n, q_heads, head_dim].
  bool predicts(Layer layer) const;
  absl::Status Predict(Layer layer, int64_t n, float* predicted_q);
  // After the layer's attention: what predictions lacked, and who watches.
  void Attended(const model::AttentionInput& input, const float* attended);

  // Sequences with one key, unless it is empty, may ask for the zone in one question of as many tokens as
  // most_asked(): each gets the bits that it gets alone.
  const std::string& batch_key() const { return batch_key_; }
  int64_t most_asked() const { return context_.max_block; }
  // Whether the zone attends to the window, too.
  bool repositioned() const { return context_.config.rope == Rope::kInfiniteHip; }
  Window& window() { return window_; }
  const Window& window() const { return window_; }
  ZoneAttention& zone() { return *zone_; }
  QueryTrace* trace() const { return trace_; }

 private:
  CpuSequence(const model::ModelConfig& model, const OpenedContext& context,
              std::shared_ptr<Runner> runner);
  absl::Status LoadContextRows();
  void Start(int64_t give_up) override;
  bool Keep(int64_t tokens) override;
  std::vector<float> CopyRows(int64_t tokens) const override;
  bool RestoreRows(const std::vector<float>& rows, int64_t tokens) override;

  const std::shared_ptr<Runner> runner_;
  const OpenedContext context_;
  const AttentionShape& shape_ = context_.shape;
  const std::vector<int64_t> windows_;
  Window window_{shape_};
  std::unique_ptr<ZoneAttention> zone_;
  QueryDrift drift_;
  std::string batch_key_;
  QueryTrace* trace_ = nullptr;
};

}  // namespace carrel::decoder
