// Decoding on a GPU. One token's work is captured once: as one graph, or, where the zone asks this
// host, as graphs that end where it does; the window is attended meanwhile, and the answer comes into
// the next graph. Blocks of a prompt take the same way without graphs.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/graph.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/client/context_rows.h"
#include "decoder/forward/attention_together.h"
#include "decoder/forward/cuda_repositioned_pass.h"
#include "decoder/forward/cuda_together.h"
#include "decoder/forward/forward_pass.h"
#include "decoder/forward/query_drift.h"
#include "decoder/select/row_selector.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/make_zone.h"
#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/encode/query_drift/query_drift_cuda.h"
#include "kernels/select/argmax/argmax_cuda.h"
#include "model/cuda_backend.h"

namespace carrel::decoder {
namespace {

using cuda::Graph;
using cuda::PinnedBuffer;
using model::CudaBackend;

constexpr int64_t kBlockTokens = 256;  // of a prompt, at once
constexpr int64_t kLogitsTokens = 16;  // whose logits are on the device at once

// What changes from one token to the next, in this order in device memory; then the token ids.
enum StepWord { kStep = 0, kWindowRows = 1, kFirstId = 2 };

struct Shape {
  Shape(const model::ModelConfig& config, const OpenedContext& context)
      : heads(config.shape),
        hidden_size(config.hidden_size),
        vocab_size(config.vocab_size),
        zone(context.zone),
        context_tokens(context.tokens),
        context_rows(context.tokens - zone.rows()),
        capacity(context_rows + context.device.new_tokens),
        block(std::min(kBlockTokens, context.device.new_tokens)),
        width(int64_t{heads.q_heads} * heads.head_dim),
        splits(kernels::DecodeSplits(capacity, heads.kv_heads)) {}

  const AttentionShape heads;
  const int64_t hidden_size, vocab_size;
  const RowRange zone;
  const int64_t context_tokens;
  const int64_t context_rows;  // of the context in the window
  const int64_t capacity;      // of the window
  const int64_t block;         // tokens at once
  const int64_t width;         // elements of all q heads of a token
  const int64_t splits;        // of the window's attention
};

// What lies on the device beside weights, window and zone.
struct Memory {
  // predicted: tokens whose queries are predicted at once.
  Memory(const Shape& shape, int64_t predicted, cuda::DeviceArena& arena)
      : step(arena.Take<int32_t>(kFirstId + shape.block)),
        best(arena.Take<int32_t>(1)),
        hidden(arena.Take<float>(shape.block * shape.hidden_size)),
        q_exact(arena.Take<float>(shape.block * shape.width)),
        window{arena.Take<float>(shape.block * shape.width),
               arena.Take<float>(shape.block * shape.heads.q_heads)},
        zone{arena.Take<float>(shape.block * shape.width),
             arena.Take<float>(shape.block * shape.heads.q_heads)},
        logits(arena.Take<float>(kLogitsTokens * shape.vocab_size)),
        q(arena.Take<uint16_t>(shape.block * shape.width)),
        attended(arena.Take<uint16_t>(shape.block * shape.width)),
        workspace(arena.Take<uint8_t>(WorkspaceBytes(shape))) {
    if (predicted == 0) return;
    const int64_t layers = shape.heads.layers;
    for (Drift* of : {&drift, &stored_drift}) {
      of->mean = arena.Take<float>(layers * shape.width);
      of->tokens = arena.Take<int32_t>(layers * shape.heads.q_heads);
    }
    predicted_exact = arena.Take<float>(2 * predicted * shape.width);
    predicted_q = arena.Take<uint16_t>(2 * predicted * shape.width);
  }
  static int64_t WorkspaceBytes(const Shape& shape) {
    return static_cast<int64_t>(kernels::DecodeWorkspaceBytes(
        shape.heads.kv_heads, shape.heads.group(), shape.heads.head_dim, shape.splits));
  }

  // As QueryDrift: [layers] of [q_heads, head_dim] before RoPE; [layers, q_heads].
  struct Drift {
    float* mean = nullptr;
    int32_t* tokens = nullptr;
  };

  int32_t *step = nullptr, *best = nullptr;
  float *hidden = nullptr, *q_exact = nullptr;
  CudaPartial window, zone;
  float* logits = nullptr;
  uint16_t *q = nullptr, *attended = nullptr;
  uint8_t* workspace = nullptr;
  // Null where no queries are predicted. Of predicted queries, after RoPE, the halves belong to even
  // and odd layers: a layer is still learned from while the next is predicted.
  Drift drift, stored_drift;
  float* predicted_exact = nullptr;
  uint16_t* predicted_q = nullptr;
};

class CudaForwardPass final : public ForwardPass {
 public:
  CudaForwardPass(const model::ModelConfig& config, const OpenedContext& context)
      : config_(config),
        shape_(config, context),
        scale_(1.0f / std::sqrt(static_cast<float>(config.shape.head_dim))),
        client_(context.client),
        most_given_up_(MostGivenUp(context.config, context.device, context.tokens)),
        statistics_(config.shape.layers) {}

  absl::Status Prepare(const model::Checkpoint& checkpoint, const OpenedContext& context);

  int64_t max_tokens() const override { return shape_.block; }
  absl::Status Run(absl::Span<const TokenId> tokens, Position first_position) override;
  void RunTogether(absl::Span<PassBlock> blocks) override;
  absl::Status Logits(int64_t count, float* logits) override;
  absl::StatusOr<TokenId> Greedy() override;
  void set_reading_prompt(bool reading) override {
    zone_->set_reading_prompt(reading);
    reading_prompt_ = reading;
    generated_ = 0;
  }
  void set_wanted(std::function<bool()> wanted) override { wanted_ = std::move(wanted); }
  // New rows begin where the first one that was given up lies.
  void StartSequence(int64_t give_up) override {
    zone_->Cancel();
    overwritten_ = overwritten_ || (given_up_ > 0 && new_rows_ > -given_up_);
    given_up_ = give_up;
    new_rows_ = -give_up;
  }
  Statistics statistics() const override;

 private:
  int64_t layers() const { return config_.shape.layers; }
  int64_t predicted_tokens() const { return zone_->predicted_tokens(shape_.block); }
  // Whether n tokens' queries of the layer are predicted, while the layer before it computes.
  bool Predicts(Layer layer, int64_t n) const {
    return layer.value() > 0 && layer.value() < layers() && zone_->predicts(layer, n);
  }
  float* drift(Layer layer) const { return memory_.drift.mean + layer.value() * shape_.width; }
  CudaQueries Queries(int64_t n) const { return {memory_.q_exact, memory_.q, n}; }
  int64_t PredictedAt(Layer layer) const {
    return layer.value() % 2 * predicted_tokens() * shape_.width;
  }
  absl::Status Allocate();
  absl::Status LoadContextRows(const OpenedContext& context);
  // Those that may be given up, for when they are wanted again.
  void KeepLastRows(const ContextRows& block, int64_t at);
  absl::Status RestoreLastRows();
  // What predicted queries lack, at first as the context says.
  absl::Status LoadDrift(const StoredDrift& stored);
  absl::Status ResetDrift();
  absl::Status CaptureToken();
  // A token as one graph.
  absl::Status WholeToken(int64_t phase);

  // The parts of a block's way. Each enqueues only.
  absl::Status Begin(int64_t n);
  absl::Status Project(Layer layer, int64_t n, int64_t phase);
  absl::Status AttendWindow(Layer layer, int64_t n);
  absl::Status AttendNewest(Layer layer);
  absl::Status AttendBlock(Layer layer, int64_t n);
  absl::Status LearnDrift(Layer layer, int64_t n);
  absl::Status FinishLayer(Layer layer, int64_t n, int64_t phase);
  absl::Status End(int64_t n, int64_t phase);

  // So few that each has the bits that it has alone.
  void RunAlike(absl::Span<PassBlock* const> tokens);
  absl::StatusOr<CudaTogether::Member> AsMember(PassBlock& one);
  void Passed(int64_t n);

  // And that somebody wants what comes of them.
  absl::Status CheckTokens(absl::Span<const TokenId> tokens) const;
  absl::Status CopyFloats(float* to, const float* from, int64_t count);
  absl::Status CopyOnDevice(void* to, const void* from, int64_t bytes);

  const model::ModelConfig& config_;
  const Shape shape_;
  const float scale_;
  retrieval::Session* const client_;
  const int64_t most_given_up_;
  std::vector<LayerStatistics> statistics_;
  std::unique_ptr<CudaZoneAttention> zone_;

  std::unique_ptr<CudaBackend> backend_;
  CudaWindow window_;
  cuda::DeviceArena plan_, arena_;
  Memory memory_{shape_, 0, plan_};
  PinnedBuffer<int32_t> host_step_, host_best_;
  PinnedBuffer<float> host_logits_;
  std::vector<Graph> project_, attend_;  // [layers]
  Graph end_;
  std::vector<Graph> token_;  // [phases of the zone]
  int64_t bytes_ = 0;         // of the device, planned; weights, which others may hold, too
  model::GpuReservation reserved_;

  std::function<bool()> wanted_;
  // Prompted and generated so far, and fewer by the rows of the context that were given up.
  int64_t new_rows_ = 0;
  int64_t given_up_ = 0;
  bool overwritten_ = false;  // some of last_rows_, in the window
  struct LastRows {
    Layer layer;
    KvHead head;
    int64_t at = 0, rows = 0;  // in the window
    std::string k, v;
  };
  std::vector<LastRows> last_rows_;
  bool reading_prompt_ = false;
  int64_t generated_ = 0;  // since the prompt
  int64_t n_ = 0;          // tokens of the last Run

  const int64_t id_ = ++made_;
  static inline std::atomic<int64_t> made_{0};
  std::shared_ptr<CudaTogether> together_;  // null: it always ran alone
  // Where the last Run was one with others: the step, and which of its members this was.
  struct Taken {
    int64_t step = 0, member = 0;
  };
  std::optional<Taken> taken_;
};

absl::Status CudaForwardPass::Allocate() {
  ASSIGN_OR_RETURN(window_, CudaWindow::Create(shape_.heads, shape_.capacity));
  ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Create(plan_));
  memory_ = Memory(shape_, predicted_tokens(), arena_);
  ASSIGN_OR_RETURN(host_step_, PinnedBuffer<int32_t>::Create(kFirstId + shape_.block));
  ASSIGN_OR_RETURN(host_best_, PinnedBuffer<int32_t>::Create(1));
  ASSIGN_OR_RETURN(host_logits_, PinnedBuffer<float>::Create(kLogitsTokens * config_.vocab_size));
  RETURN_IF_CUDA_ERROR(
      cudaMemset(memory_.workspace, 0, static_cast<size_t>(Memory::WorkspaceBytes(shape_))));
  // The zone is the empty set until something else is known of it.
  const std::vector<float> nothing(static_cast<size_t>(shape_.block * shape_.heads.q_heads),
                                   -INFINITY);
  RETURN_IF_CUDA_ERROR(cudaMemcpy(memory_.zone.lse, nothing.data(), nothing.size() * sizeof(float),
                                  cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // our stream does not wait for that one
  return absl::OkStatus();
}

absl::Status CudaForwardPass::Prepare(const model::Checkpoint& checkpoint,
                                      const OpenedContext& context) {
  RETURN_IF_ERROR(CudaBackend::Check(config_));
  const AttentionShape& heads = shape_.heads;
  if ((heads.head_dim != 64 && heads.head_dim != 128) || heads.group() > kernels::kMaxDecodeGroup) {
    return absl::UnimplementedError(absl::StrCat(
        "device cuda: decoding needs head_dim 64 or 128 and at most ", kernels::kMaxDecodeGroup,
        " q heads per KV head; the model has head_dim=", heads.head_dim, " and ", heads.group()));
  }
  ASSIGN_OR_RETURN(zone_, MakeCudaZone(context, &statistics_));
  ASSIGN_OR_RETURN(const int64_t zone_bytes, zone_->Bytes());
  ASSIGN_OR_RETURN(const int64_t shareable, zone_->ShareableBytes());
  plan_ = cuda::DeviceArena();
  Memory(shape_, predicted_tokens(), plan_);
  const int64_t own = CudaBackend::ScratchBytes(config_, shape_.block) +
                      CudaWindow::Bytes(heads, shape_.capacity) + plan_.bytes() + zone_bytes;
  bytes_ = model::CudaWeights::Bytes(config_) + own;
  const int64_t weights =
      model::CudaWeights::SharedBytes(config_, checkpoint.weights, checkpoint.adapter);
  const int64_t held = zone_->shareable_held() ? shareable : 0;
  RETURN_IF_ERROR(model::CheckGpuMemory(model::GpuReservation::all() + weights + own - held,
                                        context.device.gpu_memory));
  reserved_ = model::GpuReservation(own - shareable);
  ASSIGN_OR_RETURN(backend_, CudaBackend::Create(config_, checkpoint.weights, shape_.block,
                                                 context.pool, checkpoint.adapter));
  RETURN_IF_ERROR(Allocate());
  if (client_ != nullptr) {
    RETURN_IF_ERROR(Annotate(LoadContextRows(context), "reading rows of the context"));
  }
  if (predicted_tokens() > 0) RETURN_IF_ERROR(LoadDrift(context.drift));
  RETURN_IF_ERROR(CaptureToken());
  // The token that was run to capture it counts for nothing.
  return zone_->Reset(backend_->stream());
}

absl::Status CudaForwardPass::LoadContextRows(const OpenedContext& context) {
  const RowRange ranges[] = {{0, shape_.zone.begin}, {shape_.zone.end, shape_.context_tokens}};
  RETURN_IF_ERROR(ReadContextRows(
      client_, shape_.heads, ranges, context.max_fetch_rows, [&](const ContextRows& block) {
        const int64_t at =
            block.first < shape_.zone.begin ? block.first : block.first - shape_.zone.rows();
        KeepLastRows(block, at);
        return window_.CopyRows(block.layer, block.head, at, block.rows, block.k, block.v);
      }));
  return zone_->Load(shape_.block, backend_->stream());
}

void CudaForwardPass::KeepLastRows(const ContextRows& block, int64_t at) {
  const int64_t first = std::max(at, shape_.context_rows - most_given_up_);
  const int64_t rows = at + block.rows - first, width = int64_t{shape_.heads.head_dim} * 2;
  if (rows <= 0) return;
  const auto last = [&](const void* from) {
    return std::string(static_cast<const char*>(from) + (first - at) * width,
                       static_cast<size_t>(rows * width));
  };
  last_rows_.push_back({block.layer, block.head, first, rows, last(block.k), last(block.v)});
}

absl::Status CudaForwardPass::RestoreLastRows() {
  for (const LastRows& one : last_rows_) {
    RETURN_IF_ERROR(
        window_.CopyRows(one.layer, one.head, one.at, one.rows, one.k.data(), one.v.data()));
  }
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // our stream does not wait for that one
  overwritten_ = false;
  return absl::OkStatus();
}

absl::Status CudaForwardPass::LoadDrift(const StoredDrift& stored) {
  std::vector<float> drift(static_cast<size_t>(layers() * shape_.width));
  std::vector<int32_t> counts(static_cast<size_t>(layers() * shape_.heads.q_heads));
  for (size_t l = 0; l < stored.size(); ++l) {
    if (stored[l].empty()) continue;
    std::copy(stored[l].begin(), stored[l].end(), &drift[l * stored[l].size()]);
    std::fill_n(&counts[l * static_cast<size_t>(shape_.heads.q_heads)], shape_.heads.q_heads,
                kStoredDriftTokens);
  }
  RETURN_IF_CUDA_ERROR(cudaMemcpy(memory_.stored_drift.mean, drift.data(),
                                  drift.size() * sizeof(float), cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaMemcpy(memory_.stored_drift.tokens, counts.data(),
                                  counts.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));
  return ResetDrift();
}

absl::Status CudaForwardPass::ResetDrift() {
  RETURN_IF_ERROR(CopyOnDevice(memory_.drift.mean, memory_.stored_drift.mean,
                               layers() * shape_.width * static_cast<int64_t>(sizeof(float))));
  return CopyOnDevice(memory_.drift.tokens, memory_.stored_drift.tokens,
                      layers() * shape_.heads.q_heads * static_cast<int64_t>(sizeof(int32_t)));
}

absl::Status CudaForwardPass::WholeToken(int64_t phase) {
  RETURN_IF_ERROR(Begin(1));
  for (Layer layer(0); layer.value() < layers(); layer = layer.next()) {
    RETURN_IF_ERROR(Project(layer, 1, phase));
    RETURN_IF_ERROR(AttendWindow(layer, 1));
  }
  return End(1, phase);
}

// Runs a token that nobody asked for, so that every kernel is loaded, and captures its parts.
absl::Status CudaForwardPass::CaptureToken() {
  host_step_.data()[kStep] = 0;
  host_step_.data()[kWindowRows] = static_cast<int32_t>(shape_.context_rows + 1);
  host_step_.data()[kFirstId] = 0;
  RETURN_IF_ERROR(WholeToken(0));
  RETURN_IF_ERROR(backend_->stream().Synchronize());
  if (!zone_->asks_host()) {
    for (int64_t phase = 0; phase < zone_->phases(); ++phase) {
      ASSIGN_OR_RETURN(Graph token,
                       Graph::Capture(backend_->stream(), [&] { return WholeToken(phase); }));
      token_.push_back(std::move(token));
    }
    return absl::OkStatus();
  }
  for (Layer layer(0); layer.value() < layers(); layer = layer.next()) {
    ASSIGN_OR_RETURN(Graph project, Graph::Capture(backend_->stream(), [&]() -> absl::Status {
                       if (layer.value() == 0) RETURN_IF_ERROR(Begin(1));
                       return Project(layer, 1, 0);
                     }));
    ASSIGN_OR_RETURN(Graph attend,
                     Graph::Capture(backend_->stream(), [&] { return AttendWindow(layer, 1); }));
    project_.push_back(std::move(project));
    attend_.push_back(std::move(attend));
  }
  ASSIGN_OR_RETURN(end_, Graph::Capture(backend_->stream(), [&] { return End(1, 0); }));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::CopyFloats(float* to, const float* from, int64_t count) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float),
                                       cudaMemcpyDefault, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::CopyOnDevice(void* to, const void* from, int64_t bytes) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                                       cudaMemcpyDeviceToDevice, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::Begin(int64_t n) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.step, host_step_.data(),
                                       static_cast<size_t>(kFirstId + n) * sizeof(int32_t),
                                       cudaMemcpyHostToDevice, backend_->stream().get()));
  return backend_->Embed(memory_.step + kFirstId, n, memory_.hidden);
}

absl::Status CudaForwardPass::Project(Layer layer, int64_t n, int64_t phase) {
  if (layer.value() > 0) RETURN_IF_ERROR(FinishLayer(Layer(layer.value() - 1), n, phase));
  model::CudaPlacement placement;
  placement.first_position = shape_.context_tokens;
  placement.first_row = shape_.context_rows;
  placement.step = memory_.step + kStep;
  placement.kv = window_.kv(layer);
  RETURN_IF_ERROR(
      backend_->ProjectQkv(layer, memory_.hidden, n, placement, memory_.q, memory_.q_exact));
  RETURN_IF_ERROR(zone_->TakeQueries(layer, Queries(n), backend_->stream()));
  const Layer next = layer.next();
  if (!Predicts(next, n)) return absl::OkStatus();
  // What enters this layer, seen through the next layer's query projection, is close to that
  // layer's true query; closer, with what it lacked for other tokens.
  const CudaQueries predicted{memory_.predicted_exact + PredictedAt(next),
                              memory_.predicted_q + PredictedAt(next), n};
  RETURN_IF_ERROR(backend_->ProjectQuery(next, memory_.hidden, n, placement, drift(next),
                                         memory_.predicted_q + PredictedAt(next),
                                         memory_.predicted_exact + PredictedAt(next)));
  return zone_->Predict(next, predicted, backend_->stream());
}

absl::Status CudaForwardPass::LearnDrift(Layer layer, int64_t n) {
  kernels::QueryDriftCudaParams params;
  params.q = memory_.q_exact;
  params.predicted_q = memory_.predicted_exact + PredictedAt(layer);
  params.n = n;
  params.heads = shape_.heads.q_heads;
  params.head_dim = shape_.heads.head_dim;
  params.first_position = shape_.context_tokens;
  params.step = memory_.step + kStep;
  params.inv_freq = backend_->inv_freq();
  params.newest = kNewestDrift;
  params.mean = drift(layer);
  params.tokens = memory_.drift.tokens + layer.value() * shape_.heads.q_heads;
  RETURN_IF_CUDA_ERROR(kernels::LearnQueryDriftCuda(params, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::AttendWindow(Layer layer, int64_t n) {
  // Here, where a store at work leaves time for it.
  if (Predicts(layer, n)) RETURN_IF_ERROR(LearnDrift(layer, n));
  RETURN_IF_ERROR(n == 1 ? AttendNewest(layer) : AttendBlock(layer, n));
  return zone_->TakeWindow(layer, memory_.window.lse, n, backend_->stream());
}

// One token, whose place is on the device: can be captured.
absl::Status CudaForwardPass::AttendNewest(Layer layer) {
  const AttentionShape& heads = shape_.heads;
  kernels::WindowAttentionCudaParams params;
  params.q = memory_.q;
  params.kv = window_.kv(layer);
  params.kv_heads = heads.kv_heads;
  params.group = heads.group();
  params.head_dim = heads.head_dim;
  params.row_count = memory_.step + kWindowRows;
  params.scale = scale_;
  params.out = memory_.window.out;
  params.lse = memory_.window.lse;
  params.splits = shape_.splits;
  params.workspace = memory_.workspace;
  RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(params, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::AttendBlock(Layer layer, int64_t n) {
  const AttentionShape& heads = shape_.heads;
  kernels::PrefillAttentionCudaParams params;
  params.q = memory_.q;
  params.kv = window_.kv(layer);
  params.n = n;
  params.first_position = shape_.context_rows + new_rows_;
  params.rows = params.first_position + n;
  params.q_heads = heads.q_heads;
  params.kv_heads = heads.kv_heads;
  params.head_dim = heads.head_dim;
  params.scale = scale_;
  params.out_exact = memory_.window.out;
  params.lse = memory_.window.lse;
  RETURN_IF_CUDA_ERROR(kernels::PrefillAttentionCuda(params, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::FinishLayer(Layer layer, int64_t n, int64_t phase) {
  RETURN_IF_ERROR(zone_->Attend(layer, Queries(n), phase, memory_.zone, backend_->stream()));
  kernels::MergeStatesCudaParams merge;
  merge.out_a = memory_.window.out;
  merge.lse_a = memory_.window.lse;
  merge.out_b = memory_.zone.out;
  merge.lse_b = memory_.zone.lse;
  merge.out_bf16 = memory_.attended;
  merge.heads = n * shape_.heads.q_heads;
  merge.head_dim = shape_.heads.head_dim;
  RETURN_IF_CUDA_ERROR(kernels::MergeStatesCuda(merge, backend_->stream().get()));
  return backend_->FinishLayer(layer, memory_.attended, n, memory_.hidden);
}

absl::Status CudaForwardPass::End(int64_t n, int64_t phase) {
  RETURN_IF_ERROR(FinishLayer(Layer(static_cast<int32_t>(layers() - 1)), n, phase));
  RETURN_IF_ERROR(
      backend_->Logits(memory_.hidden + (n - 1) * config_.hidden_size, 1, memory_.logits));
  RETURN_IF_CUDA_ERROR(kernels::ArgmaxCuda(memory_.logits, 1, config_.vocab_size, memory_.best,
                                           backend_->stream().get()));
  RETURN_IF_ERROR(zone_->CopyCounters(backend_->stream()));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_best_.data(), memory_.best, sizeof(int32_t),
                                       cudaMemcpyDeviceToHost, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::CheckTokens(absl::Span<const TokenId> tokens) const {
  if (wanted_ && !wanted_()) return NotWanted();
  for (TokenId token : tokens) {
    if (token >= 0 && token < config_.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "token id ", token, " is outside the vocabulary [0, ", config_.vocab_size, ")"));
  }
  const int64_t wanted = new_rows_ + static_cast<int64_t>(tokens.size());
  if (shape_.context_rows + wanted <= shape_.capacity) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the GPU's window has room for ", shape_.capacity - shape_.context_rows,
                   " new tokens (gpu_new_tokens); ", wanted, " are needed"));
}

absl::Status CudaForwardPass::Run(absl::Span<const TokenId> tokens, Position first_position) {
  const cuda::Range range("tokens");
  const int64_t n = static_cast<int64_t>(tokens.size());
  CARREL_CHECK(n >= 1 && n <= shape_.block && first_position == shape_.context_tokens + new_rows_);
  RETURN_IF_ERROR(CheckTokens(tokens));
  const cuda::Stream& stream = backend_->stream();
  RETURN_IF_ERROR(stream.Synchronize());  // what the last block reads of pinned memory is read
  if (overwritten_) RETURN_IF_ERROR(RestoreLastRows());
  host_step_.data()[kStep] = static_cast<int32_t>(new_rows_);
  host_step_.data()[kWindowRows] = static_cast<int32_t>(shape_.context_rows + new_rows_ + n);
  std::copy(tokens.begin(), tokens.end(), host_step_.data() + kFirstId);
  n_ = n;
  taken_.reset();
  if (new_rows_ == -given_up_ && predicted_tokens() > 0) RETURN_IF_ERROR(ResetDrift());
  const bool captured = n == 1 && !(reading_prompt_ && zone_->prompt_takes_all());
  if (captured && !zone_->asks_host()) {
    const int64_t phase = zone_->PhaseOf(reading_prompt_ ? kPromptStep : generated_);
    RETURN_IF_ERROR(token_[static_cast<size_t>(phase)].Launch(stream));
  } else {
    if (!captured) RETURN_IF_ERROR(Begin(n));
    for (Layer layer(0); layer.value() < layers(); layer = layer.next()) {
      RETURN_IF_ERROR(captured ? project_[layer.value()].Launch(stream) : Project(layer, n, 0));
      RETURN_IF_ERROR(zone_->QueriesEnqueued(stream));
      RETURN_IF_ERROR(captured ? attend_[layer.value()].Launch(stream) : AttendWindow(layer, n));
      RETURN_IF_ERROR(zone_->Ask(layer, n));
      RETURN_IF_ERROR(zone_->Answer(layer, n, stream));
    }
    RETURN_IF_ERROR(captured ? end_.Launch(stream) : End(n, 0));
  }
  Passed(n);
  return absl::OkStatus();
}

void CudaForwardPass::Passed(int64_t n) {
  zone_->Count(n, statistics_);
  new_rows_ += n;
  if (!reading_prompt_) generated_ += n;
}

// What is asked ahead is each sequence's own: such sequences go one by one. So do prompts.
void CudaForwardPass::RunTogether(absl::Span<PassBlock> blocks) {
  std::vector<PassBlock*> alike;
  for (PassBlock& one : blocks) {
    auto& pass = *static_cast<CudaForwardPass*>(one.pass);
    if (pass.predicted_tokens() == 0 && !pass.reading_prompt_) {
      alike.push_back(&one);
    } else {
      one.status = pass.Run(one.tokens, one.first_position);
    }
  }
  constexpr auto kMost = static_cast<size_t>(CudaTogether::kMembers);
  for (size_t begin = 0; begin < alike.size(); begin += kMost) {
    RunAlike(absl::MakeSpan(alike).subspan(begin, kMost));
  }
}

void CudaForwardPass::RunAlike(absl::Span<PassBlock* const> tokens) {
  if (tokens.size() > 1 && together_ == nullptr) {
    absl::StatusOr<std::shared_ptr<CudaTogether>> together =
        CudaTogether::Of(config_, backend_->weights());
    if (together.ok()) together_ = *std::move(together);
  }
  if (tokens.size() == 1 || together_ == nullptr) {  // without room for it each goes alone
    for (PassBlock* one : tokens) one->status = one->pass->Run(one->tokens, one->first_position);
    return;
  }
  std::vector<PassBlock*> those;
  std::vector<CudaTogether::Member> members;
  for (PassBlock* one : tokens) {
    absl::StatusOr<CudaTogether::Member> member =
        static_cast<CudaForwardPass*>(one->pass)->AsMember(*one);
    one->status = member.status();
    if (!member.ok()) continue;
    those.push_back(one);
    members.push_back(*member);
  }
  if (members.empty()) return;
  std::vector<TokenId> best;
  const absl::StatusOr<int64_t> step = together_->Step(members, best);
  for (size_t i = 0; i < those.size(); ++i) {
    PassBlock& one = *those[i];
    if (!step.ok()) one.status = step.status();
    if (!one.status.ok()) continue;
    auto& pass = *static_cast<CudaForwardPass*>(one.pass);
    pass.together_ = together_;
    pass.taken_ = Taken{*step, static_cast<int64_t>(i)};
    *pass.host_best_.data() = best[i];
    pass.n_ = 1;
    pass.Passed(1);
  }
}

absl::StatusOr<CudaTogether::Member> CudaForwardPass::AsMember(PassBlock& one) {
  CARREL_CHECK(one.tokens.size() == 1);
  CARREL_CHECK(one.first_position == shape_.context_tokens + new_rows_);
  RETURN_IF_ERROR(CheckTokens(one.tokens));
  RETURN_IF_ERROR(backend_->stream().Synchronize());  // what it did alone is done
  CudaTogether::Member member;
  member.id = id_;
  member.token = one.tokens[0];
  member.position = one.first_position;
  member.row = shape_.context_rows + new_rows_;
  member.window = &window_;
  member.zone = zone_.get();
  member.phase = zone_->PhaseOf(reading_prompt_ ? kPromptStep : generated_);
  member.splits = shape_.splits;
  member.workspace = memory_.workspace;
  member.hidden = memory_.hidden;
  member.status = &one.status;
  return member;
}

absl::Status CudaForwardPass::Logits(int64_t count, float* logits) {
  CARREL_CHECK(count <= n_);
  if (taken_.has_value() && count == 1) {
    ASSIGN_OR_RETURN(const bool copied,
                     together_->CopyLogits(taken_->step, taken_->member, logits));
    if (copied) return absl::OkStatus();
  }
  for (int64_t at = 0; at < count; at += kLogitsTokens) {
    const int64_t n = std::min(kLogitsTokens, count - at);
    RETURN_IF_ERROR(backend_->Logits(memory_.hidden + (n_ - count + at) * config_.hidden_size, n,
                                     memory_.logits));
    RETURN_IF_ERROR(CopyFloats(host_logits_.data(), memory_.logits, n * config_.vocab_size));
    RETURN_IF_ERROR(backend_->stream().Synchronize());
    std::copy_n(host_logits_.data(), n * config_.vocab_size, logits + at * config_.vocab_size);
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenId> CudaForwardPass::Greedy() {
  RETURN_IF_ERROR(backend_->stream().Synchronize());
  if (*host_best_.data() < 0) return absl::InternalError("a logit is NaN");
  return *host_best_.data();
}

Statistics CudaForwardPass::statistics() const {
  Statistics statistics;
  statistics.layers = statistics_;
  zone_->AddTo(statistics.layers);
  if (client_ != nullptr) {
    statistics.bytes_sent = client_->bytes_sent();
    statistics.bytes_received = client_->bytes_received();
  }
  statistics.window_bytes = window_.bytes();
  statistics.weight_bytes = model::CudaWeights::Bytes(config_);
  statistics.device_bytes = bytes_;
  return statistics;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaForwardPass(
    const model::Checkpoint& checkpoint, const OpenedContext& context) {
  if (context.config.rope == Rope::kInfiniteHip) {
    return MakeCudaRepositionedPass(checkpoint, context);
  }
  auto pass = std::make_unique<CudaForwardPass>(checkpoint.config, context);
  RETURN_IF_ERROR(pass->Prepare(checkpoint, context));
  return pass;
}

}  // namespace carrel::decoder
