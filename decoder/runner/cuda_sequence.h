// What:   a sequence on a GPU: the window of the rows that are held there, the zone, wherever it lives, and
//         the graphs of a step that it takes alone. What a step computes on the way is the runner's.
// Errors: Plan, Load: as runner.h.
// Ownership: as runner.h.
// Threads: one; Plan, Load: any, beside others' steps.
// Cost:   Load takes all memory, and reads sink, local and what the zone holds.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/graph.h"
#include "common/cuda/stream.h"
#include "decoder/runner/query_drift.h"
#include "decoder/runner/runner.h"
#include "decoder/select/row_selector.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/zone_attention.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/encode/query_drift/query_drift_cuda.h"
#include "model/config.h"
#include "model/device.h"

namespace carrel::decoder {

// A step of one token each of the same sequences, enqueued anew in few calls: where no zone asks this host one graph, else
// of each layer what comes before the answer is waited for, projections and attention, and at last the end.
using StepGraphs = std::vector<cuda::Graph>;

class CudaSequence final : public Sequence {
 public:
  static constexpr int64_t kBlockTokens = 256;  // of a slice, at most

  // weight_bytes: of the device, that the runner holds.
  CudaSequence(const OpenedContext& context, std::shared_ptr<Runner> runner, int64_t weight_bytes);
  // Makes the zone, and reserves the memory of the device, if it and what the runner lacks are there. runner_bytes: all
  // that the runner holds then.
  absl::Status Plan(int64_t runner_bytes, int64_t runner_lacks);
  // Takes that memory and fills it; the runner holds its own.
  absl::Status Load(const cuda::Stream& stream);

  Runner& runner() override { return *runner_; }
  CudaSequence* on_cuda() override { return this; }
  int64_t max_tokens() const override { return block_; }
  Statistics statistics() const override;

  int64_t id() const { return id_; }  // no other sequence of this process has it, nor will
  CudaZoneAttention& zone() const { return *zone_; }
  const CudaWindow& window() const { return window_; }
  Position context_tokens() const { return context_.tokens; }
  // Of its window, what the next token becomes.
  int64_t next_row() const { return end() - context_.zone.rows(); }

  // Of a step: whether there is room for the slice and somebody wants it; what comes before it; after it.
  absl::Status Check(const Slice& slice) const;
  absl::Status Begin(const Slice& slice, const cuda::Stream& stream);
  void Passed(const Slice& slice);
  // Of the slice at hand, of n tokens: whether StepGraphs say what it does, and what the zone's choice of
  // rows depends on.
  bool is_token(int64_t n) const { return n == 1 && !(of_prompt_ && zone_->prompt_takes_all()); }
  int64_t phase(int64_t n) const {
    return is_token(n) ? zone_->PhaseOf(of_prompt_ ? kPromptStep : generated_) : 0;
  }
  std::vector<StepGraphs>& graphs() { return graphs_; }  // [phases], of a token alone

  // Attention of one token to the window, whose rows row_count counts.
  kernels::WindowAttentionCudaParams ToWindow(Layer layer, const uint16_t* q,
                                              const int32_t* row_count,
                                              const CudaPartial& to) const;
  // Whether n tokens' queries of the layer are predicted, while the layer before it computes; where they
  // are; what they lack.
  bool predicts(Layer layer, int64_t n) const {
    return layer.value() > 0 && layer.value() < shape_.layers && zone_->predicts(layer, n);
  }
  struct Predicted {
    float* exact = nullptr;
    uint16_t* rounded = nullptr;
  };
  Predicted predicted(Layer layer) const {
    const int64_t at = layer.value() % 2 * predicted_tokens() * width();
    return {predicted_.exact + at, predicted_.rounded + at};
  }
  const float* drift(Layer layer) const { return drift_.mean + layer.value() * width(); }
  // Learns it of n true queries; step: where the first stands, behind the context.
  absl::Status LearnDrift(Layer layer, const float* q, int64_t n, const int32_t* step,
                          const float* inv_freq, const cuda::Stream& stream) const;

 private:
  // [layers] of [q_heads, head_dim] before RoPE; [layers, q_heads].
  struct Drift {
    float* mean = nullptr;
    int32_t* tokens = nullptr;
  };

  // Plans its memory, or lays it out.
  void Lay(cuda::DeviceArena& arena);
  absl::Status LoadContextRows();
  // Of those that may be given up: to this host, or back, for when they are wanted again.
  absl::Status CopyLastRows(cudaMemcpyKind to);
  // What predicted queries lack, at first as the context says.
  absl::Status LoadDrift();
  absl::Status ResetDrift(const cuda::Stream& stream) const;
  void Start(int64_t give_up) override;

  int64_t width() const { return int64_t{shape_.q_heads} * shape_.head_dim; }
  int64_t predicted_tokens() const { return zone_->predicted_tokens(block_); }
  int64_t context_rows() const { return context_.tokens - context_.zone.rows(); }  // in the window

  const std::shared_ptr<Runner> runner_;
  const OpenedContext context_;
  const AttentionShape& shape_ = context_.shape;
  const int64_t new_tokens_ = context_.device.new_tokens;  // that there is room for
  const int64_t block_;                                    // tokens at once
  const int64_t splits_;                                   // of the window's attention
  const int64_t most_given_up_;
  std::unique_ptr<CudaZoneAttention> zone_;
  CudaWindow window_;
  cuda::DeviceArena arena_;
  uint8_t* workspace_ = nullptr;
  // Null where no queries are predicted. Of predicted queries, after RoPE, the halves belong to even and
  // odd layers: a layer is still learned from while the next is predicted.
  Drift drift_, stored_drift_;
  Predicted predicted_;
  // Of the device, planned: in all, and of it what others hold, too: the runner's, and of that weights.
  int64_t bytes_ = 0, runner_bytes_ = 0;
  const int64_t weight_bytes_;
  model::GpuReservation reserved_;
  std::vector<StepGraphs> graphs_;

  bool of_prompt_ = false;
  int64_t generated_ = 0;  // since the prompt
  // Rows in last_rows_ were written over by this sequence; by one before it.
  bool writes_over_ = false, overwritten_ = false;
  std::vector<kernels::Bf16> last_rows_;  // [layers, K and V, kv_heads, most_given_up_, head_dim]

  const int64_t id_ = ++made_;
  static inline std::atomic<int64_t> made_{0};
};

}  // namespace carrel::decoder
