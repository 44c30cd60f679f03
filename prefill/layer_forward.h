// What:   the part of prefill that depends on the device: takes all tokens of a document through
//         the model, one layer at a time, and hands out the layer's rows.
// Shapes: the hidden state [tokens, hidden_size] f32 is what enters the next layer, of the document's
//         tokens and those of the probe behind them (model/tokenizer/probe.h).
// Errors: ResourceExhausted memory; Unavailable no such device; FailedPrecondition a build without
//         CUDA; Unimplemented a shape that the device's kernels do not run.
// Threads: one caller. Rows that were handed out may be read by other threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/thread_pool.h"
#include "model/checkpoint.h"
#include "prefill/attention_config.h"
#include "prefill/layer_rows.h"

namespace carrel::prefill {

// Where the time of the device went, where it can tell; seconds, over all layers so far.
struct ForwardTimes {
  double projections = 0;  // all products, norms and RoPE
  double attention = 0;
  double copy_out = 0;       // that copies of rows went on, beside the rest
  double copy_out_wait = 0;  // of which a layer that was else complete waited
};

// What enters a layer after the first.
struct HiddenState {
  absl::Span<const float> all;  // [tokens and probe, hidden_size]
  // [min(kDriftTokens, tokens), hidden_size]: what entered the layer before, of the tokens that give
  // the drift.
  absl::Span<const float> before;
};

class LayerForward {
 public:
  virtual ~LayerForward() = default;

  // Of the document and the probe.
  virtual absl::Status Embed(const std::vector<TokenId>& tokens) = 0;
  // layer: the one to be run next, at least 1.
  virtual absl::Status SetHidden(Layer layer, const HiddenState& state) = 0;
  // What enters the layer after the one that was run last. Valid until the next call.
  virtual absl::StatusOr<HiddenState> Hidden() = 0;

  // Layers are run in order. passed(n): n tokens have passed the layer. take is given the layer's
  // rows, once, as soon as they are final; their failures are Run's. rows_only: of the last
  // layer nothing else is wanted, so nothing else is computed.
  virtual absl::Status Run(Layer layer, bool rows_only,
                           absl::FunctionRef<absl::Status(int64_t)> passed,
                           absl::FunctionRef<absl::Status(LayerRows)> take) = 0;

  virtual ForwardTimes times() const = 0;
  virtual int64_t device_bytes() const = 0;  // of a GPU's memory
};

struct ForwardPlan {
  int64_t tokens = 0;
  // Tokens that follow the document's and change nothing of theirs; 0 unless attention is dense and keys
  // are after RoPE.
  int64_t probe = 0;
  std::vector<Position> sample_positions;
  std::vector<Position> recheck_positions;  // of which each layer's rows say what entered it
  AttentionConfig attention;
};

std::unique_ptr<LayerForward> MakeCpuForward(const model::Checkpoint& checkpoint,
                                             const ForwardPlan& plan, int64_t block_tokens,
                                             ThreadPool* pool);

// Whether MakeCudaForward can work here at all: a build with CUDA, a device, a shape that it runs.
absl::Status CheckCudaForward(const model::ModelConfig& config);

// gpu_memory: bound on device bytes, of which others take bytes_beside, or model::kAllGpuMemory.
// rows_ahead: layers whose rows may be
// held by others at once; Run waits for one of them to be given back.
absl::StatusOr<std::unique_ptr<LayerForward>> MakeCudaForward(const model::Checkpoint& checkpoint,
                                                              const ForwardPlan& plan,
                                                              int64_t gpu_memory,
                                                              int64_t bytes_beside, int rows_ahead,
                                                              ThreadPool* pool);

// Gives back all that the process holds of its GPU, as its end would: for who has more to do when RunPrefill is over. No
// object of CUDA may be alive, and none be made meanwhile. In a build without CUDA it does nothing.
void LeaveGpu();

}  // namespace carrel::prefill
