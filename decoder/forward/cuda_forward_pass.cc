// Decoding on a GPU. One token's work is captured once, as graphs that end where the store is
// asked: queries leave for pinned memory, the window is attended while the store answers, and the
// answer comes back through pinned memory into the next graph. Blocks of a prompt take the same way
// without graphs. With the zone on the device, or without one, a token is one graph.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "carrel/v1/retrieval.pb.h"
#include "common/cuda/buffer.h"
#include "common/cuda/graph.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/client/context_rows.h"
#include "decoder/forward/forward_pass.h"
#include "decoder/forward/query_drift.h"
#include "decoder/select/host_rows.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/bank_plan.h"
#include "decoder/zone/cuda_device_zone.h"
#include "decoder/zone/cuda_host_zone.h"
#include "decoder/zone/store_zone.h"
#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/encode/query_drift/query_drift_cuda.h"
#include "kernels/select/argmax/argmax_cuda.h"
#include "model/cuda_backend.h"

namespace carrel::decoder {
namespace {

using cuda::DeviceBuffer;
using cuda::Graph;
using cuda::PinnedBuffer;
using model::CudaBackend;

constexpr int64_t kBlockTokens = 256;  // of a prompt, at once
constexpr int64_t kLogitsTokens = 16;  // whose logits are on the device at once

// What changes from one token to the next, in this order in device memory; then the token ids.
enum StepWord { kStep = 0, kWindowRows = 1, kFirstId = 2 };

struct Shape {
  Shape(const model::ModelConfig& config, const DeviceConfig& device, const v1::OpenReply& opened)
      : heads(config.shape),
        zone{opened.zone_begin(), opened.zone_end()},
        context_tokens(opened.tokens()),
        context_rows(opened.tokens() - zone.rows()),
        capacity(context_rows + device.new_tokens),
        block(std::min(kBlockTokens, device.new_tokens)),
        width(int64_t{heads.q_heads} * heads.head_dim),
        zone_here(device.zone_on_device && zone.rows() > 0),
        zone_in_host(device.zone_in_host && zone.rows() > 0),
        zone_at_store(!device.zone_on_device && !device.zone_in_host && zone.rows() > 0) {}

  const AttentionShape heads;
  const RowRange zone;
  const int64_t context_tokens;
  const int64_t context_rows;  // of the context in the window
  const int64_t capacity;      // of the window
  const int64_t block;         // tokens at once
  const int64_t width;         // elements of all q heads of a token
  const bool zone_here, zone_in_host, zone_at_store;
};

class CudaForwardPass final : public ForwardPass {
 public:
  CudaForwardPass(const model::ModelConfig& config, const RetrievalConfig& retrieval,
                  const DeviceConfig& device, const v1::OpenReply& opened, StoreClient* client,
                  ThreadPool* pool, std::shared_ptr<const HostRows> host_rows)
      : config_(config),
        retrieval_(retrieval),
        bank_(device.bank),
        shape_(config, device, opened),
        scale_(1.0f / std::sqrt(static_cast<float>(config.shape.head_dim))),
        client_(client),
        host_rows_(std::move(host_rows)),
        statistics_(config.shape.layers),
        zone_(retrieval, config.shape, opened, client, pool, &statistics_) {}

  absl::Status Prepare(const model::Checkpoint& checkpoint, const DeviceConfig& device,
                       const v1::OpenReply& opened, ThreadPool* pool);

  int64_t max_tokens() const override { return shape_.block; }
  absl::Status Run(absl::Span<const TokenId> tokens, Position first_position) override;
  absl::Status Logits(int64_t count, float* logits) override;
  absl::StatusOr<TokenId> Greedy() override;
  void set_reading_prompt(bool reading) override {
    zone_.set_reading_prompt(reading);
    reading_prompt_ = reading;
    generated_ = 0;
  }
  void StartSequence() override {
    zone_.Cancel();
    new_rows_ = 0;
  }
  Statistics statistics() const override;

 private:
  int64_t layers() const { return config_.shape.layers; }
  bool prefetches(Layer layer) const {
    return shape_.zone_at_store && retrieval_.prefetch != Prefetch::kOff &&
           layer.next().value() < layers();
  }
  // Whether a zone that the GPU attends to has the estimation term.
  bool estimates() const { return retrieval_.estimate == Estimate::kOn; }
  // Whether rows are asked for ahead at all.
  bool speculates() const {
    return (shape_.zone_at_store || shape_.zone_in_host) && retrieval_.prefetch != Prefetch::kOff;
  }
  // Whether n tokens' approximate queries of the layer are made, while the layer before it computes.
  bool approximates(Layer layer, int64_t n) const {
    if (layer.value() == 0 || layer.value() == layers()) return false;
    if (shape_.zone_in_host) return n == 1 && pinned_zone_.fetches_ahead(layer);
    return prefetches(Layer(layer.value() - 1));
  }
  int64_t guess_tokens() const { return shape_.zone_at_store ? shape_.block : 1; }
  float* drift(Layer layer) const { return drift_.data() + layer.value() * shape_.width; }
  // Of every second layer: one is still learned from while the next is made.
  float* guess(Layer layer) const {
    return guess_.data() + layer.value() % 2 * guess_tokens() * shape_.width;
  }
  int64_t zone_phases() const {
    return shape_.zone_in_host ? pinned_zone_.phases() : device_zone_.phases();
  }
  int64_t OwnBytes() const;
  absl::Status Allocate();
  absl::Status LoadContextRows(const v1::OpenReply& opened, ThreadPool* pool);
  // What approximate queries lack, at first as the context says.
  absl::Status LoadDrift(const v1::OpenReply& opened);
  absl::Status ResetDrift();
  absl::Status CaptureToken();
  // A token as one graph.
  absl::Status WholeToken(int64_t phase);

  // The parts of a block's way. Each enqueues only.
  absl::Status Begin(int64_t n);
  absl::Status Project(Layer layer, int64_t n);
  absl::Status AttendWindow(Layer layer, int64_t n);
  absl::Status LearnDrift(Layer layer, int64_t n);
  absl::Status AttendZone(Layer layer, int64_t n, int64_t phase);
  // What this layer's hidden state says of the next layer's rows.
  absl::Status FetchAhead(Layer next, const model::CudaPlacement& placement);
  absl::Status FinishLayer(Layer layer, int64_t n);
  absl::Status End(int64_t n);

  // Hands queries to the store and its answer to the next part.
  absl::Status AskStore(Layer layer, int64_t n);
  absl::Status CopyFloats(float* to, const float* from, int64_t count);

  const model::ModelConfig& config_;
  const RetrievalConfig retrieval_;
  const BankConfig bank_;
  const Shape shape_;
  const float scale_;
  StoreClient* const client_;
  const std::shared_ptr<const HostRows> host_rows_;
  std::vector<LayerStatistics> statistics_;
  StoreZone zone_;  // at the store
  Partial partial_;
  std::vector<float> window_lse_;

  std::unique_ptr<CudaBackend> backend_;
  CudaWindow window_;
  CudaDeviceZone device_zone_;
  BankPlan bank_plan_;  // of pinned_zone_
  CudaHostZone pinned_zone_;
  int64_t splits_ = 0;
  DeviceBuffer<int32_t> step_;
  DeviceBuffer<float> hidden_, q_exact_, window_out_, lse_, zone_out_, zone_lse_, logits_;
  DeviceBuffer<uint16_t> q_, approximate_q_, attended_;
  // As QueryDrift: drift_ and stored_drift_ [layers] of [q_heads, head_dim] before RoPE, drift_counts_
  // and stored_counts_ [layers, q_heads], guess_ two blocks' approximate queries after RoPE.
  DeviceBuffer<float> drift_, stored_drift_, guess_;
  DeviceBuffer<int32_t> drift_counts_, stored_counts_;
  DeviceBuffer<int32_t> best_;
  DeviceBuffer<uint8_t> workspace_;
  PinnedBuffer<int32_t> host_step_, host_best_;
  PinnedBuffer<float> host_q_, host_approximate_q_, host_zone_, host_lse_, host_logits_;
  cuda::Event queries_here_;
  std::vector<Graph> project_, attend_;  // [layers]
  Graph end_;
  std::vector<Graph> token_;  // [phases of the zone]
  int64_t zone_bytes_ = 0;    // of it

  int64_t new_rows_ = 0;  // prompted and generated so far
  bool reading_prompt_ = false;
  int64_t generated_ = 0;  // since the prompt
  int64_t n_ = 0;          // tokens of the last Run
};

int64_t CudaForwardPass::OwnBytes() const {
  const int64_t n = shape_.block, heads = n * shape_.heads.q_heads, w = n * shape_.width;
  const int64_t floats =
      n * config_.hidden_size + w + 2 * (w + heads) + kLogitsTokens * config_.vocab_size;
  const int64_t splits = kernels::DecodeSplits(shape_.capacity, shape_.heads.kv_heads);
  const int64_t drift_bytes = speculates()
                                  ? 4 * (2 * layers() * (shape_.width + shape_.heads.q_heads) +
                                         2 * guess_tokens() * shape_.width)
                                  : 0;
  return CudaWindow::Bytes(shape_.heads, shape_.capacity) + (kFirstId + n + 1 + floats) * 4 +
         3 * w * 2 +
         static_cast<int64_t>(kernels::DecodeWorkspaceBytes(
             shape_.heads.kv_heads, shape_.heads.group(), shape_.heads.head_dim, splits)) +
         drift_bytes + zone_bytes_;
}

absl::Status CudaForwardPass::Allocate() {
  const int64_t n = shape_.block, heads = n * shape_.heads.q_heads, w = n * shape_.width;
  ASSIGN_OR_RETURN(window_, CudaWindow::Create(shape_.heads, shape_.capacity));
  for (const auto& [buffer, count] : {std::pair{&hidden_, n * config_.hidden_size},
                                      {&q_exact_, w},
                                      {&window_out_, w},
                                      {&lse_, heads},
                                      {&zone_out_, w},
                                      {&zone_lse_, heads},
                                      {&logits_, kLogitsTokens * config_.vocab_size}}) {
    ASSIGN_OR_RETURN(*buffer, DeviceBuffer<float>::Create(count));
  }
  for (DeviceBuffer<uint16_t>* buffer : {&q_, &approximate_q_, &attended_}) {
    ASSIGN_OR_RETURN(*buffer, DeviceBuffer<uint16_t>::Create(w));
  }
  ASSIGN_OR_RETURN(step_, DeviceBuffer<int32_t>::Create(kFirstId + n));
  ASSIGN_OR_RETURN(best_, DeviceBuffer<int32_t>::Create(1));
  ASSIGN_OR_RETURN(host_step_, PinnedBuffer<int32_t>::Create(kFirstId + n));
  ASSIGN_OR_RETURN(host_best_, PinnedBuffer<int32_t>::Create(1));
  ASSIGN_OR_RETURN(host_q_, PinnedBuffer<float>::Create(w));
  ASSIGN_OR_RETURN(host_approximate_q_, PinnedBuffer<float>::Create(w));
  ASSIGN_OR_RETURN(host_zone_, PinnedBuffer<float>::Create(w + heads));
  ASSIGN_OR_RETURN(host_lse_, PinnedBuffer<float>::Create(heads));
  ASSIGN_OR_RETURN(host_logits_, PinnedBuffer<float>::Create(kLogitsTokens * config_.vocab_size));
  ASSIGN_OR_RETURN(queries_here_, cuda::Event::Create());
  splits_ = kernels::DecodeSplits(shape_.capacity, shape_.heads.kv_heads);
  ASSIGN_OR_RETURN(
      workspace_,
      DeviceBuffer<uint8_t>::Create(static_cast<int64_t>(kernels::DecodeWorkspaceBytes(
          shape_.heads.kv_heads, shape_.heads.group(), shape_.heads.head_dim, splits_))));
  RETURN_IF_CUDA_ERROR(cudaMemset(workspace_.data(), 0, static_cast<size_t>(workspace_.bytes())));
  // The zone is the empty set until something else is known of it.
  std::fill_n(host_zone_.data(), w, 0.0f);
  std::fill_n(host_zone_.data() + w, heads, -INFINITY);
  RETURN_IF_CUDA_ERROR(cudaMemcpy(zone_lse_.data(), host_zone_.data() + w,
                                  static_cast<size_t>(zone_lse_.bytes()), cudaMemcpyHostToDevice));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::Prepare(const model::Checkpoint& checkpoint,
                                      const DeviceConfig& device, const v1::OpenReply& opened,
                                      ThreadPool* pool) {
  RETURN_IF_ERROR(CudaBackend::Check(config_));
  const AttentionShape& heads = shape_.heads;
  if ((heads.head_dim != 64 && heads.head_dim != 128) || heads.group() > kernels::kMaxDecodeGroup) {
    return absl::UnimplementedError(absl::StrCat(
        "device cuda: decoding needs head_dim 64 or 128 and at most ", kernels::kMaxDecodeGroup,
        " q heads per KV head; the model has head_dim=", heads.head_dim, " and ", heads.group()));
  }
  if (shape_.zone_in_host) {
    ASSIGN_OR_RETURN(bank_plan_, PlanBanks(retrieval_, bank_, heads, shape_.zone.rows()));
    ASSIGN_OR_RETURN(zone_bytes_,
                     CudaHostZone::Bytes(bank_plan_, bank_, *retrieval_.selector, estimates(),
                                         heads, shape_.zone, host_rows_.get()));
  }
  if (shape_.zone_here) {
    ASSIGN_OR_RETURN(zone_bytes_,
                     CudaDeviceZone::Bytes(retrieval_, heads, shape_.zone, host_rows_.get()));
  }
  RETURN_IF_ERROR(model::CheckGpuMemory(CudaBackend::Bytes(config_, shape_.block) + OwnBytes(),
                                        device.gpu_memory));
  ASSIGN_OR_RETURN(backend_, CudaBackend::Create(config_, checkpoint.weights, shape_.block, pool,
                                                 checkpoint.adapter.get()));
  RETURN_IF_ERROR(Allocate());
  if (client_ != nullptr) {
    RETURN_IF_ERROR(Annotate(LoadContextRows(opened, pool), "reading rows of the context"));
  }
  if (speculates()) RETURN_IF_ERROR(LoadDrift(opened));
  RETURN_IF_ERROR(CaptureToken());
  // The token that was run to capture it counts for nothing.
  return shape_.zone_in_host ? pinned_zone_.Reset(backend_->stream()) : absl::OkStatus();
}

absl::Status CudaForwardPass::LoadContextRows(const v1::OpenReply& opened, ThreadPool* pool) {
  const int64_t max_fetch_rows = opened.limits().max_fetch_rows();
  const RowRange ranges[] = {{0, shape_.zone.begin}, {shape_.zone.end, opened.tokens()}};
  RETURN_IF_ERROR(
      ReadContextRows(client_, shape_.heads, ranges, max_fetch_rows, [&](const ContextRows& block) {
        const int64_t at =
            block.first < shape_.zone.begin ? block.first : block.first - shape_.zone.rows();
        return window_.CopyRows(block.layer, block.head, at, block.rows, block.k, block.v);
      }));
  if (shape_.zone_in_host) {
    ASSIGN_OR_RETURN(pinned_zone_,
                     CudaHostZone::Create(bank_plan_, bank_, *retrieval_.selector, estimates(),
                                          shape_.heads, shape_.zone, max_fetch_rows, client_,
                                          host_rows_.get(), pool, backend_->stream()));
  }
  if (!shape_.zone_here) return absl::OkStatus();
  ASSIGN_OR_RETURN(device_zone_,
                   CudaDeviceZone::Create(retrieval_, shape_.heads, shape_.zone, max_fetch_rows,
                                          client_, host_rows_.get(), pool, backend_->stream()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::LoadDrift(const v1::OpenReply& opened) {
  ASSIGN_OR_RETURN(const StoredDrift stored, ReadDrift(opened, shape_.heads));
  std::vector<float> drift(static_cast<size_t>(layers() * shape_.width));
  std::vector<int32_t> counts(static_cast<size_t>(layers() * shape_.heads.q_heads));
  for (size_t l = 0; l < stored.size(); ++l) {
    if (stored[l].empty()) continue;
    std::copy(stored[l].begin(), stored[l].end(), &drift[l * stored[l].size()]);
    std::fill_n(&counts[l * static_cast<size_t>(shape_.heads.q_heads)], shape_.heads.q_heads,
                kStoredDriftTokens);
  }
  for (DeviceBuffer<float>* buffer : {&drift_, &stored_drift_}) {
    ASSIGN_OR_RETURN(*buffer, DeviceBuffer<float>::Create(static_cast<int64_t>(drift.size())));
  }
  for (DeviceBuffer<int32_t>* buffer : {&drift_counts_, &stored_counts_}) {
    ASSIGN_OR_RETURN(*buffer, DeviceBuffer<int32_t>::Create(static_cast<int64_t>(counts.size())));
  }
  ASSIGN_OR_RETURN(guess_, DeviceBuffer<float>::Create(2 * guess_tokens() * shape_.width));
  RETURN_IF_CUDA_ERROR(cudaMemcpy(stored_drift_.data(), drift.data(),
                                  static_cast<size_t>(stored_drift_.bytes()),
                                  cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaMemcpy(stored_counts_.data(), counts.data(),
                                  static_cast<size_t>(stored_counts_.bytes()),
                                  cudaMemcpyHostToDevice));
  return ResetDrift();
}

absl::Status CudaForwardPass::ResetDrift() {
  const cudaStream_t stream = backend_->stream().get();
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(drift_.data(), stored_drift_.data(),
                                       static_cast<size_t>(drift_.bytes()),
                                       cudaMemcpyDeviceToDevice, stream));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(drift_counts_.data(), stored_counts_.data(),
                                       static_cast<size_t>(drift_counts_.bytes()),
                                       cudaMemcpyDeviceToDevice, stream));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::WholeToken(int64_t phase) {
  RETURN_IF_ERROR(Begin(1));
  for (Layer layer(0); layer.value() < layers(); layer = layer.next()) {
    RETURN_IF_ERROR(Project(layer, 1));
    RETURN_IF_ERROR(AttendWindow(layer, 1));
    RETURN_IF_ERROR(AttendZone(layer, 1, phase));
  }
  return End(1);
}

// Runs a token that nobody asked for, so that every kernel is loaded, and captures its parts.
absl::Status CudaForwardPass::CaptureToken() {
  host_step_.data()[kStep] = 0;
  host_step_.data()[kWindowRows] = static_cast<int32_t>(shape_.context_rows + 1);
  host_step_.data()[kFirstId] = 0;
  RETURN_IF_ERROR(WholeToken(0));
  RETURN_IF_ERROR(backend_->stream().Synchronize());
  if (!shape_.zone_at_store) {
    for (int64_t phase = 0; phase < zone_phases(); ++phase) {
      ASSIGN_OR_RETURN(Graph token,
                       Graph::Capture(backend_->stream(), [&] { return WholeToken(phase); }));
      token_.push_back(std::move(token));
    }
    return absl::OkStatus();
  }
  for (Layer layer(0); layer.value() < layers(); layer = layer.next()) {
    ASSIGN_OR_RETURN(Graph project, Graph::Capture(backend_->stream(), [&]() -> absl::Status {
                       if (layer.value() == 0) RETURN_IF_ERROR(Begin(1));
                       return Project(layer, 1);
                     }));
    ASSIGN_OR_RETURN(Graph attend,
                     Graph::Capture(backend_->stream(), [&] { return AttendWindow(layer, 1); }));
    project_.push_back(std::move(project));
    attend_.push_back(std::move(attend));
  }
  ASSIGN_OR_RETURN(end_, Graph::Capture(backend_->stream(), [&] { return End(1); }));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::CopyFloats(float* to, const float* from, int64_t count) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float),
                                       cudaMemcpyDefault, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::Begin(int64_t n) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(step_.data(), host_step_.data(),
                                       static_cast<size_t>(kFirstId + n) * sizeof(int32_t),
                                       cudaMemcpyHostToDevice, backend_->stream().get()));
  return backend_->Embed(step_.data() + kFirstId, n, hidden_.data());
}

absl::Status CudaForwardPass::Project(Layer layer, int64_t n) {
  if (layer.value() > 0) RETURN_IF_ERROR(FinishLayer(Layer(layer.value() - 1), n));
  model::CudaPlacement placement;
  placement.first_position = shape_.context_tokens;
  placement.first_row = shape_.context_rows;
  placement.step = step_.data() + kStep;
  placement.k = window_.k(layer);
  placement.v = window_.v(layer);
  placement.kv_stride = shape_.capacity * shape_.heads.head_dim;
  RETURN_IF_ERROR(
      backend_->ProjectQkv(layer, hidden_.data(), n, placement, q_.data(), q_exact_.data()));
  if (shape_.zone_in_host && approximates(layer.next(), n))
    RETURN_IF_ERROR(FetchAhead(layer.next(), placement));
  if (!shape_.zone_at_store) return absl::OkStatus();
  RETURN_IF_ERROR(CopyFloats(host_q_.data(), q_exact_.data(), n * shape_.width));
  if (!prefetches(layer)) return absl::OkStatus();
  // What enters this layer, seen through the next layer's query projection, is close to that
  // layer's true query; closer, with what it lacked for other tokens.
  const Layer next = layer.next();
  RETURN_IF_ERROR(backend_->ProjectQuery(next, hidden_.data(), n, placement, drift(next),
                                         approximate_q_.data(), guess(next)));
  return CopyFloats(host_approximate_q_.data(), guess(next), n * shape_.width);
}

absl::Status CudaForwardPass::FetchAhead(Layer next, const model::CudaPlacement& placement) {
  RETURN_IF_ERROR(backend_->ProjectQuery(next, hidden_.data(), 1, placement, drift(next),
                                         pinned_zone_.approximate_q(next), guess(next)));
  return pinned_zone_.FetchAhead(next, backend_->stream());
}

absl::Status CudaForwardPass::LearnDrift(Layer layer, int64_t n) {
  kernels::QueryDriftCudaParams params;
  params.q = q_exact_.data();
  params.guess = guess(layer);
  params.n = n;
  params.heads = shape_.heads.q_heads;
  params.head_dim = shape_.heads.head_dim;
  params.first_position = shape_.context_tokens;
  params.step = step_.data() + kStep;
  params.inv_freq = backend_->inv_freq();
  params.newest = kNewestDrift;
  params.mean = drift(layer);
  params.tokens = drift_counts_.data() + layer.value() * shape_.heads.q_heads;
  RETURN_IF_CUDA_ERROR(kernels::LearnQueryDriftCuda(params, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::AttendWindow(Layer layer, int64_t n) {
  const AttentionShape& heads = shape_.heads;
  // Here, where a store at work leaves time for it.
  if (approximates(layer, n)) RETURN_IF_ERROR(LearnDrift(layer, n));
  if (n == 1) {
    kernels::WindowAttentionCudaParams params;
    params.q = q_.data();
    params.k = window_.k(layer);
    params.v = window_.v(layer);
    params.kv_heads = heads.kv_heads;
    params.group = heads.group();
    params.head_dim = heads.head_dim;
    params.row_stride = shape_.capacity;
    params.row_count = step_.data() + kWindowRows;
    params.scale = scale_;
    params.out = window_out_.data();
    params.lse = lse_.data();
    params.splits = splits_;
    params.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(params, backend_->stream().get()));
  } else {
    kernels::PrefillAttentionCudaParams params;
    params.q = q_.data();
    params.k = window_.k(layer);
    params.v = window_.v(layer);
    params.kv_stride = shape_.capacity * heads.head_dim;
    params.n = n;
    params.first_position = shape_.context_rows + new_rows_;
    params.rows = params.first_position + n;
    params.q_heads = heads.q_heads;
    params.kv_heads = heads.kv_heads;
    params.head_dim = heads.head_dim;
    params.scale = scale_;
    params.out_exact = window_out_.data();
    params.lse = lse_.data();
    RETURN_IF_CUDA_ERROR(kernels::PrefillAttentionCuda(params, backend_->stream().get()));
  }
  if (!retrieval_.measure || !shape_.zone_at_store) return absl::OkStatus();
  return CopyFloats(host_lse_.data(), lse_.data(), n * heads.q_heads);
}

absl::Status CudaForwardPass::AttendZone(Layer layer, int64_t n, int64_t phase) {
  if (!shape_.zone_here && !shape_.zone_in_host) return absl::OkStatus();
  const bool after_fetch = shape_.zone_in_host && n == 1 && pinned_zone_.fetches_ahead(layer);
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t* q = q_.data() + i * shape_.width;
    float* out = zone_out_.data() + i * shape_.width;
    float* lse = zone_lse_.data() + i * shape_.heads.q_heads;
    RETURN_IF_ERROR(
        shape_.zone_in_host
            ? pinned_zone_.Attend(layer, q, phase, after_fetch, out, lse, backend_->stream())
            : device_zone_.Attend(layer, q, phase, out, lse, backend_->stream()));
  }
  return absl::OkStatus();
}

absl::Status CudaForwardPass::FinishLayer(Layer layer, int64_t n) {
  const int64_t heads = n * shape_.heads.q_heads;
  if (shape_.zone_at_store) {
    RETURN_IF_ERROR(CopyFloats(zone_out_.data(), host_zone_.data(), n * shape_.width));
    RETURN_IF_ERROR(CopyFloats(zone_lse_.data(), host_zone_.data() + n * shape_.width, heads));
  }
  kernels::MergeStatesCudaParams merge;
  merge.out_a = window_out_.data();
  merge.lse_a = lse_.data();
  merge.out_b = zone_out_.data();
  merge.lse_b = zone_lse_.data();
  merge.out_bf16 = attended_.data();
  merge.heads = heads;
  merge.head_dim = shape_.heads.head_dim;
  RETURN_IF_CUDA_ERROR(kernels::MergeStatesCuda(merge, backend_->stream().get()));
  return backend_->FinishLayer(layer, attended_.data(), n, hidden_.data());
}

absl::Status CudaForwardPass::End(int64_t n) {
  RETURN_IF_ERROR(FinishLayer(Layer(static_cast<int32_t>(layers() - 1)), n));
  RETURN_IF_ERROR(
      backend_->Logits(hidden_.data() + (n - 1) * config_.hidden_size, 1, logits_.data()));
  RETURN_IF_CUDA_ERROR(kernels::ArgmaxCuda(logits_.data(), 1, config_.vocab_size, best_.data(),
                                           backend_->stream().get()));
  if (shape_.zone_in_host) RETURN_IF_ERROR(pinned_zone_.CopyCounters(backend_->stream()));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_best_.data(), best_.data(), sizeof(int32_t),
                                       cudaMemcpyDeviceToHost, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaForwardPass::AskStore(Layer layer, int64_t n) {
  const cuda::Range range("store");
  RETURN_IF_ERROR(queries_here_.Synchronize());
  RETURN_IF_ERROR(zone_.Start(layer, host_q_.data(), n));
  if (prefetches(layer))
    RETURN_IF_ERROR(zone_.Prefetch(layer.next(), host_approximate_q_.data(), n));
  RETURN_IF_ERROR(zone_.Finish(layer, host_q_.data(), n, partial_));
  if (retrieval_.measure) {
    RETURN_IF_ERROR(backend_->stream().Synchronize());
    window_lse_.assign(host_lse_.data(), host_lse_.data() + n * shape_.heads.q_heads);
  }
  RETURN_IF_ERROR(zone_.Measure(layer, host_q_.data(), n, partial_, window_lse_));
  std::copy(partial_.out.begin(), partial_.out.end(), host_zone_.data());
  std::copy(partial_.lse.begin(), partial_.lse.end(), host_zone_.data() + partial_.out.size());
  return absl::OkStatus();
}

absl::Status CudaForwardPass::Run(absl::Span<const TokenId> tokens, Position first_position) {
  const cuda::Range range("tokens");
  const int64_t n = static_cast<int64_t>(tokens.size());
  CARREL_CHECK(n >= 1 && n <= shape_.block && first_position == shape_.context_tokens + new_rows_);
  for (TokenId token : tokens) {
    if (token >= 0 && token < config_.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "token id ", token, " is outside the vocabulary [0, ", config_.vocab_size, ")"));
  }
  if (shape_.context_rows + new_rows_ + n > shape_.capacity) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the GPU's window has room for ", shape_.capacity - shape_.context_rows,
                     " new tokens (gpu_new_tokens); ", new_rows_ + n, " are needed"));
  }
  const cuda::Stream& stream = backend_->stream();
  RETURN_IF_ERROR(stream.Synchronize());  // what the last block reads of pinned memory is read
  host_step_.data()[kStep] = static_cast<int32_t>(new_rows_);
  host_step_.data()[kWindowRows] = static_cast<int32_t>(shape_.context_rows + new_rows_ + n);
  std::copy(tokens.begin(), tokens.end(), host_step_.data() + kFirstId);
  n_ = n;
  if (new_rows_ == 0 && speculates()) RETURN_IF_ERROR(ResetDrift());
  if (n == 1 && !shape_.zone_at_store) {
    const int64_t step = reading_prompt_ ? kPromptStep : generated_;
    const int64_t phase =
        shape_.zone_in_host ? pinned_zone_.PhaseOf(step) : device_zone_.PhaseOf(step);
    RETURN_IF_ERROR(token_[static_cast<size_t>(phase)].Launch(stream));
  } else {
    if (n > 1) RETURN_IF_ERROR(Begin(n));
    for (Layer layer(0); layer.value() < layers(); layer = layer.next()) {
      RETURN_IF_ERROR(n == 1 ? project_[layer.value()].Launch(stream) : Project(layer, n));
      if (shape_.zone_at_store) RETURN_IF_ERROR(queries_here_.Record(stream));
      RETURN_IF_ERROR(n == 1 ? attend_[layer.value()].Launch(stream) : AttendWindow(layer, n));
      if (shape_.zone_at_store) {
        RETURN_IF_ERROR(AskStore(layer, n));
      } else {
        RETURN_IF_ERROR(AttendZone(layer, n, 0));
      }
    }
    RETURN_IF_ERROR(n == 1 ? end_.Launch(stream) : End(n));
  }
  for (Layer layer(0); !shape_.zone_at_store && layer.value() < layers(); layer = layer.next()) {
    const int64_t attended = shape_.zone_here ? device_zone_.attended(layer)
                             : shape_.zone_in_host
                                 ? shape_.heads.kv_heads * pinned_zone_.attended(layer)
                                 : 0;
    statistics_[layer.value()].tokens += n;
    statistics_[layer.value()].rows_attended += n * attended;
  }
  new_rows_ += n;
  if (!reading_prompt_) generated_ += n;
  return absl::OkStatus();
}

absl::Status CudaForwardPass::Logits(int64_t count, float* logits) {
  CARREL_CHECK(count <= n_);
  for (int64_t at = 0; at < count; at += kLogitsTokens) {
    const int64_t n = std::min(kLogitsTokens, count - at);
    RETURN_IF_ERROR(backend_->Logits(hidden_.data() + (n_ - count + at) * config_.hidden_size, n,
                                     logits_.data()));
    RETURN_IF_ERROR(CopyFloats(host_logits_.data(), logits_.data(), n * config_.vocab_size));
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
  if (shape_.zone_in_host) pinned_zone_.AddTo(statistics.layers);
  if (client_ != nullptr) {
    statistics.bytes_sent = client_->bytes_sent();
    statistics.bytes_received = client_->bytes_received();
  }
  statistics.window_bytes = window_.bytes();
  statistics.weight_bytes = model::CudaWeights::Bytes(config_);
  statistics.device_bytes = CudaBackend::Bytes(config_, shape_.block) + OwnBytes();
  return statistics;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaForwardPass(
    const model::Checkpoint& checkpoint, const RetrievalConfig& config, const DeviceConfig& device,
    const v1::OpenReply& opened, StoreClient* client, ThreadPool* pool,
    std::shared_ptr<const HostRows> host_rows) {
  auto pass = std::make_unique<CudaForwardPass>(checkpoint.config, config, device, opened, client,
                                                pool, std::move(host_rows));
  RETURN_IF_ERROR(pass->Prepare(checkpoint, device, opened, pool));
  return pass;
}

}  // namespace carrel::decoder
