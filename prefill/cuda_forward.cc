// Layer-major prefill on a GPU. The hidden states of all tokens and one layer's Q, K and V stay on
// the device. First all tokens are projected, a chunk at a time; each chunk's rows leave for pinned
// memory at once, on a stream of their own. So the layer's rows are complete, and are indexed and
// written, while its attention and its MLP go on, which take most of the time.
#include <algorithm>
#include <utility>

#include "common/cuda/arena.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/encode/query_drift/query_drift_cuda.h"
#include "kernels/layer/gather_rows/gather_rows_cuda.h"
#include "kernels/of_heads.h"
#include "model/cuda_backend.h"
#include "model/device.h"
#include "prefill/cuda_sparse_attention.h"
#include "prefill/layer_forward.h"
#include "prefill/pinned_rows.h"

namespace carrel::prefill {
namespace {

using cuda::Event;
using cuda::PinnedBuffer;
using cuda::Stream;
using model::CudaBackend;

// Long enough to fill the chip in every product and the attention; short enough that scratch stays
// small beside the weights.
constexpr int64_t kChunkTokens = 8192;
// Chunks that the host enqueues ahead of the device: enough that it has work while the host waits
// for whoever takes the rows.
constexpr int64_t kChunksAhead = 32;

struct Sizes {
  // samples: the probe's among them.
  Sizes(const model::ModelConfig& config, int64_t tokens, int64_t probe, int64_t samples,
        int64_t rechecked)
      : chunk(std::min(kChunkTokens, std::max(tokens, probe))),
        hidden((tokens + probe) * config.hidden_size),
        q_width(int64_t{config.shape.q_heads} * config.shape.head_dim),
        rows(tokens * config.shape.kv_heads * config.shape.head_dim),
        probe_rows(probe * config.shape.kv_heads * config.shape.head_dim),
        samples(samples * q_width),
        drift_tokens(std::min(kDriftTokens, tokens)),
        before(drift_tokens * config.hidden_size),
        rechecked(rechecked * config.hidden_size) {}

  const int64_t chunk;       // tokens
  const int64_t hidden;      // floats
  const int64_t q_width;     // elements of all q heads of a token
  const int64_t rows;        // elements of the document's K, and of V
  const int64_t probe_rows;  // the same of the probe
  const int64_t samples;     // floats
  const int64_t drift_tokens;
  const int64_t before;     // floats that enter a layer, of those tokens
  const int64_t rechecked;  // the same, of those that are computed again
};

class CudaForward final : public LayerForward {
 public:
  CudaForward(const model::ModelConfig& config, const ForwardPlan& plan)
      : config_(config),
        attends_(plan.attention),
        tokens_(plan.tokens),
        probe_(plan.probe),
        all_tokens_(tokens_ + probe_),
        sample_positions_(plan.sample_positions),
        drift_positions_(SamplePositions(tokens_, kDriftTokens)),
        recheck_positions_(plan.recheck_positions),
        sizes_(config, tokens_, probe_, static_cast<int64_t>(sample_positions_.size()) + probe_,
               static_cast<int64_t>(recheck_positions_.size())) {
    CARREL_CHECK(probe_ == 0 || (!sparse() && probe_ <= sizes_.chunk));
  }

  absl::Status Allocate(const model::Checkpoint& checkpoint, int64_t gpu_memory,
                        int64_t bytes_beside, int rows_ahead, ThreadPool* pool) {
    RETURN_IF_ERROR(CudaBackend::Check(config_));
    if (sparse()) RETURN_IF_ERROR(CudaSparseAttention::Check(attends_, config_.shape));
    RETURN_IF_ERROR(model::CheckGpuMemory(device_bytes() + bytes_beside, gpu_memory));
    ASSIGN_OR_RETURN(backend_, CudaBackend::Create(config_, checkpoint.weights, sizes_.chunk, pool,
                                                   checkpoint.adapter, attends_.rope));
    if (sparse()) {
      ASSIGN_OR_RETURN(sparse_,
                       CudaSparseAttention::Create(attends_, config_, tokens_, sizes_.chunk));
    }
    ASSIGN_OR_RETURN(copy_stream_, Stream::Create());
    ASSIGN_OR_RETURN(
        arena_, cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { memory_ = Lay(arena); }));
    ASSIGN_OR_RETURN(host_samples_, PinnedBuffer<float>::Create(sizes_.samples));
    ASSIGN_OR_RETURN(host_drift_, PinnedBuffer<float>::Create(sizes_.q_width));
    ASSIGN_OR_RETURN(host_entering_,
                     PinnedBuffer<float>::Create(std::max<int64_t>(1, sizes_.rechecked)));
    ASSIGN_OR_RETURN(host_probe_,
                     PinnedBuffer<uint16_t>::Create(std::max<int64_t>(1, 2 * sizes_.probe_rows)));
    ASSIGN_OR_RETURN(pinned_, PinnedRows::Create(rows_ahead, 2 * sizes_.rows * 2));
    for (Marks& marks : marks_) {
      for (Event* event : {&marks.begin, &marks.attended, &marks.end}) {
        ASSIGN_OR_RETURN(*event, Event::Create(Event::Timing::kOn));
      }
    }
    for (Projection& p : projections_) {
      for (Event* event : {&p.begin, &p.projected, &p.copying, &p.copied}) {
        ASSIGN_OR_RETURN(*event, Event::Create(Event::Timing::kOn));
      }
    }
    ASSIGN_OR_RETURN(chunk_projected_, Event::Create());
    return UploadPositions();
  }

  absl::Status Embed(const std::vector<TokenId>& tokens) override {
    CARREL_CHECK(static_cast<int64_t>(tokens.size()) == all_tokens_);
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.ids, tokens.data(),
                                         tokens.size() * sizeof(TokenId), cudaMemcpyHostToDevice,
                                         backend_->stream().get()));
    RETURN_IF_ERROR(backend_->Embed(memory_.ids, all_tokens_, memory_.hidden));
    return backend_->stream().Synchronize();
  }

  absl::Status SetHidden(Layer layer, const HiddenState& state) override {
    CARREL_CHECK(layer.value() > 0 && static_cast<int64_t>(state.all.size()) == sizes_.hidden &&
                 static_cast<int64_t>(state.before.size()) == sizes_.before);
    run_layer_ = layer.value() - 1;
    // On the stream that uses them: it does not wait for the default stream, whose copies from
    // memory that is not pinned may return before they have arrived.
    const Stream& stream = backend_->stream();
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.hidden, state.all.data(),
                                         state.all.size() * sizeof(float), cudaMemcpyHostToDevice,
                                         stream.get()));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(Before(run_layer_), state.before.data(),
                                         state.before.size() * sizeof(float),
                                         cudaMemcpyHostToDevice, stream.get()));
    return stream.Synchronize();
  }

  absl::StatusOr<HiddenState> Hidden() override {
    CARREL_CHECK(run_layer_ >= 0);
    host_hidden_.resize(static_cast<size_t>(sizes_.hidden));
    host_before_.resize(static_cast<size_t>(sizes_.before));
    RETURN_IF_CUDA_ERROR(cudaMemcpy(host_hidden_.data(), memory_.hidden,
                                    host_hidden_.size() * sizeof(float), cudaMemcpyDeviceToHost));
    RETURN_IF_CUDA_ERROR(cudaMemcpy(host_before_.data(), Before(run_layer_),
                                    host_before_.size() * sizeof(float), cudaMemcpyDeviceToHost));
    return HiddenState{host_hidden_, host_before_};
  }

  absl::Status Run(Layer layer, bool rows_only, absl::FunctionRef<absl::Status(int64_t)> passed,
                   absl::FunctionRef<absl::Status(LayerRows)> take) override {
    const cuda::Range range("prefill layer");
    run_layer_ = layer.value();
    if (projected_layer_ != layer.value()) RETURN_IF_ERROR(ProjectAll(layer));
    const Projection& projection = ProjectionOf(layer);
    const int64_t chunks = rows_only ? 0 : Chunks();
    const int64_t ahead = std::min(chunks, kChunksAhead);
    for (int64_t chunk = 0; chunk < ahead; ++chunk) RETURN_IF_ERROR(FinishChunk(layer, chunk));
    RETURN_IF_ERROR(projection.copied.Synchronize());
    RETURN_IF_ERROR(take(TakeRows(layer)));
    if (ahead == chunks) RETURN_IF_ERROR(ProjectNext(layer));
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      RETURN_IF_ERROR(AddTimes(chunk));
      RETURN_IF_ERROR(passed(std::min(tokens_, (chunk + 1) * sizes_.chunk)));
      if (chunk + ahead < chunks) RETURN_IF_ERROR(FinishChunk(layer, chunk + ahead));
      if (chunk + ahead == chunks - 1) RETURN_IF_ERROR(ProjectNext(layer));
    }
    if (rows_only) RETURN_IF_ERROR(passed(tokens_));
    return AddLayerTimes(projection, rows_only);
  }

  ForwardTimes times() const override { return times_; }
  int64_t device_bytes() const override {
    const int64_t sparse_bytes =
        sparse() ? CudaSparseAttention::Bytes(attends_, config_, tokens_, sizes_.chunk) : 0;
    return CudaBackend::Bytes(config_, sizes_.chunk) + sparse_bytes +
           cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
  }

 private:
  bool sparse() const { return attends_.kind != AttentionKind::kDense; }

  // What lies on the device beside the backend.
  struct Memory {
    int32_t* ids = nullptr;
    int32_t* sample_rows = nullptr;  // of each token the row of samples its query becomes, or -1
    int32_t* drift_rows = nullptr;   // drift_positions_
    int32_t* recheck_rows = nullptr;
    float *hidden = nullptr, *samples = nullptr, *entering = nullptr;
    float* before[2] = {};
    float *drift_q = nullptr, *drift_predicted_q = nullptr, *drift = nullptr;
    int32_t* drift_counts = nullptr;
    kernels::KvRows kv;
    kernels::Bf16 *q = nullptr, *attended = nullptr;
  };
  // Plans it, or lays it out.
  Memory Lay(cuda::DeviceArena& arena) const {
    Memory memory;
    memory.ids = arena.Take<int32_t>(all_tokens_);
    memory.sample_rows = arena.Take<int32_t>(all_tokens_);
    memory.drift_rows = arena.Take<int32_t>(sizes_.drift_tokens);
    memory.recheck_rows = arena.Take<int32_t>(static_cast<int64_t>(recheck_positions_.size()));
    memory.hidden = arena.Take<float>(sizes_.hidden);
    memory.entering = arena.Take<float>(sizes_.rechecked);
    memory.samples = arena.Take<float>(sizes_.samples);
    for (float*& before : memory.before) before = arena.Take<float>(sizes_.before);
    memory.drift_q = arena.Take<float>(sizes_.drift_tokens * sizes_.q_width);
    memory.drift_predicted_q = arena.Take<float>(sizes_.drift_tokens * sizes_.q_width);
    memory.drift = arena.Take<float>(sizes_.q_width);
    memory.drift_counts = arena.Take<int32_t>(config_.shape.q_heads);
    const int64_t rows = sizes_.rows + sizes_.probe_rows;
    memory.kv = {arena.Take<kernels::Bf16>(rows), arena.Take<kernels::Bf16>(rows), all_tokens_};
    memory.q = arena.Take<kernels::Bf16>(all_tokens_ * sizes_.q_width);
    memory.attended = arena.Take<kernels::Bf16>(sizes_.chunk * sizes_.q_width);
    return memory;
  }

  // The document's tokens, and behind them the probe's, which never share a chunk with them: how many
  // tokens pass together may show in their bits.
  int64_t DocumentChunks() const { return (tokens_ + sizes_.chunk - 1) / sizes_.chunk; }
  int64_t Chunks() const { return DocumentChunks() + (probe_ > 0 ? 1 : 0); }
  RowRange TokensOf(int64_t chunk) const {
    if (chunk == DocumentChunks()) return {tokens_, all_tokens_};
    return {chunk * sizes_.chunk, std::min(tokens_, (chunk + 1) * sizes_.chunk)};
  }

  // Of the sampled tokens, of those that give the drift and of those that are computed again; they
  // are the same in every layer.
  absl::Status UploadPositions() {
    std::vector<int32_t> sample_rows(static_cast<size_t>(all_tokens_), -1);
    for (size_t i = 0; i < sample_positions_.size(); ++i) {
      int32_t& row = sample_rows[sample_positions_[i]];
      CARREL_CHECK(row < 0);  // no token is sampled twice
      row = static_cast<int32_t>(i);
    }
    for (int64_t i = 0; i < probe_; ++i) {
      sample_rows[static_cast<size_t>(tokens_ + i)] =
          static_cast<int32_t>(static_cast<int64_t>(sample_positions_.size()) + i);
    }
    const std::vector<int32_t> drift_rows(drift_positions_.begin(), drift_positions_.end());
    const std::vector<int32_t> recheck_rows(recheck_positions_.begin(), recheck_positions_.end());
    const auto upload = [&](const std::vector<int32_t>& from, int32_t* to) {
      return cudaMemcpyAsync(to, from.data(), from.size() * sizeof(int32_t), cudaMemcpyHostToDevice,
                             backend_->stream().get());
    };
    RETURN_IF_CUDA_ERROR(upload(sample_rows, memory_.sample_rows));
    RETURN_IF_CUDA_ERROR(upload(drift_rows, memory_.drift_rows));
    RETURN_IF_CUDA_ERROR(upload(recheck_rows, memory_.recheck_rows));
    return backend_->stream().Synchronize();
  }

  // Points of a chunk's way through the second half of a layer.
  struct Marks {
    Event begin, attended, end;
  };

  Marks& MarksOf(int64_t chunk) { return marks_[chunk % kChunksAhead]; }

  // The first half of a layer, which is enqueued while the layer before it computes, so that the
  // device never waits for the host: where its rows go, and points on its way.
  struct Projection {
    std::shared_ptr<void> rows;
    Event begin, projected, copying, copied;
  };

  Projection& ProjectionOf(Layer layer) { return projections_[layer.value() % 2]; }

  // Of the layer after this one, if there is one.
  absl::Status ProjectNext(Layer layer) {
    if (layer.value() + 1 == config_.shape.layers) return absl::OkStatus();
    return ProjectAll(layer.next());
  }

  // Q, K and V of all tokens, and the copies of K, V and the sampled queries to the host, the
  // document's rows and the probe's to places of their own.
  absl::Status ProjectAll(Layer layer) {
    const Stream& stream = backend_->stream();
    Projection& projection = ProjectionOf(layer);
    projection.rows = pinned_->Take();
    projected_layer_ = layer.value();
    auto* const rows = static_cast<uint16_t*>(projection.rows.get());
    RETURN_IF_ERROR(projection.begin.Record(stream));
    RETURN_IF_ERROR(MeasureDrift(layer));
    // The host has those of the layer before: it waited for their copy.
    RETURN_IF_CUDA_ERROR(kernels::GatherRowsCuda(
        memory_.hidden, memory_.recheck_rows, static_cast<int64_t>(recheck_positions_.size()),
        config_.hidden_size, memory_.entering, stream.get()));
    for (int64_t chunk = 0; chunk < Chunks(); ++chunk) {
      const cuda::Range range("prefill projection");
      const int64_t at = TokensOf(chunk).begin, n = TokensOf(chunk).rows();
      model::CudaPlacement placement;
      placement.first_position = at;
      placement.first_row = at;
      placement.kv = memory_.kv;
      placement.q_exact_rows = memory_.sample_rows + at;
      RETURN_IF_ERROR(backend_->ProjectQkv(layer, memory_.hidden + at * config_.hidden_size, n,
                                           placement, memory_.q + at * sizes_.q_width,
                                           memory_.samples));
      RETURN_IF_ERROR(chunk_projected_.Record(stream));
      RETURN_IF_ERROR(copy_stream_.WaitFor(chunk_projected_));
      if (at == 0) RETURN_IF_ERROR(projection.copying.Record(copy_stream_));
      if (at < tokens_) {
        const int64_t d = config_.shape.head_dim;
        RETURN_IF_ERROR(CopyOut(memory_.kv.k, at, n, rows + at * d, tokens_));
        RETURN_IF_ERROR(CopyOut(memory_.kv.v, at, n, rows + sizes_.rows + at * d, tokens_));
      } else {
        uint16_t* const probe = host_probe_.data();
        RETURN_IF_ERROR(CopyOut(memory_.kv.k, at, n, probe, probe_));
        RETURN_IF_ERROR(CopyOut(memory_.kv.v, at, n, probe + sizes_.probe_rows, probe_));
      }
    }
    RETURN_IF_ERROR(projection.projected.Record(stream));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_samples_.data(), memory_.samples,
                                         static_cast<size_t>(sizes_.samples) * sizeof(float),
                                         cudaMemcpyDeviceToHost, copy_stream_.get()));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_drift_.data(), memory_.drift,
                                         static_cast<size_t>(sizes_.q_width) * sizeof(float),
                                         cudaMemcpyDeviceToHost, copy_stream_.get()));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_entering_.data(), memory_.entering,
                                         static_cast<size_t>(sizes_.rechecked) * sizeof(float),
                                         cudaMemcpyDeviceToHost, copy_stream_.get()));
    return projection.copied.Record(copy_stream_);
  }

  // What enters a layer, of drift_positions_; of the layer before it is still there.
  float* Before(int32_t layer) { return memory_.before[layer % 2]; }

  absl::Status MeasureDrift(Layer layer) {
    const Stream& stream = backend_->stream();
    float* const entering = Before(layer.value());
    RETURN_IF_CUDA_ERROR(kernels::GatherRowsCuda(memory_.hidden, memory_.drift_rows,
                                                 sizes_.drift_tokens, config_.hidden_size, entering,
                                                 stream.get()));
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(
        memory_.drift, 0, static_cast<size_t>(sizes_.q_width) * sizeof(float), stream.get()));
    if (layer.value() == 0) return absl::OkStatus();
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(
        memory_.drift_counts, 0, static_cast<size_t>(config_.shape.q_heads) * sizeof(int32_t),
        stream.get()));
    // Only their difference before RoPE counts, so they may stand anywhere, if at the same places.
    const model::CudaPlacement anywhere;
    for (const auto& [hidden, q] : {std::pair{entering, memory_.drift_q},
                                    {Before(layer.value() - 1), memory_.drift_predicted_q}}) {
      RETURN_IF_ERROR(backend_->ProjectQuery(layer, hidden, sizes_.drift_tokens, anywhere, nullptr,
                                             memory_.attended, q));
    }
    kernels::QueryDriftCudaParams params;
    params.q = memory_.drift_q;
    params.predicted_q = memory_.drift_predicted_q;
    params.n = sizes_.drift_tokens;
    params.heads = config_.shape.q_heads;
    params.head_dim = config_.shape.head_dim;
    params.inv_freq = backend_->inv_freq();
    params.mean = memory_.drift;
    params.tokens = memory_.drift_counts;
    RETURN_IF_CUDA_ERROR(kernels::LearnQueryDriftCuda(params, stream.get()));
    return absl::OkStatus();
  }

  absl::Status FinishChunk(Layer layer, int64_t chunk) {
    const cuda::Range range("prefill chunk");
    const Stream& stream = backend_->stream();
    const int64_t at = TokensOf(chunk).begin, n = TokensOf(chunk).rows();
    Marks& marks = MarksOf(chunk);
    RETURN_IF_ERROR(marks.begin.Record(stream));
    if (sparse()) {
      RETURN_IF_ERROR(sparse_->Attend(layer, memory_.q + at * sizes_.q_width, memory_.kv, at, n,
                                      memory_.attended, stream));
    } else {
      RETURN_IF_ERROR(AttendDensely(at, n));
    }
    RETURN_IF_ERROR(marks.attended.Record(stream));
    RETURN_IF_ERROR(backend_->FinishLayer(layer, memory_.attended, n,
                                          memory_.hidden + at * config_.hidden_size));
    return marks.end.Record(stream);
  }

  absl::Status AttendDensely(int64_t at, int64_t n) {
    auto attention = kernels::OfHeads<kernels::PrefillAttentionCudaParams>(config_.shape);
    attention.q = memory_.q + at * sizes_.q_width;
    attention.kv = memory_.kv;
    attention.n = n;
    attention.first_position = at;
    attention.rows = at + n;
    attention.out = memory_.attended;
    RETURN_IF_CUDA_ERROR(kernels::PrefillAttentionCuda(attention, backend_->stream().get()));
    return absl::OkStatus();
  }

  // Rows [at, at + n) of every head; in `to` a head has head_rows.
  absl::Status CopyOut(const kernels::Bf16* from, int64_t at, int64_t n, uint16_t* to,
                       int64_t head_rows) {
    const int64_t d = config_.shape.head_dim;
    RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(
        to, static_cast<size_t>(head_rows * d * 2), from + at * d,
        static_cast<size_t>(all_tokens_ * d * 2), static_cast<size_t>(n * d * 2),
        static_cast<size_t>(config_.shape.kv_heads), cudaMemcpyDeviceToHost, copy_stream_.get()));
    return absl::OkStatus();
  }

  // Seconds from one recorded event to another that has happened.
  static absl::StatusOr<double> Between(const Event& from, const Event& to) {
    float milliseconds = 0;
    RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, from.get(), to.get()));
    return milliseconds / 1000;
  }

  // Waits for the chunk.
  absl::Status AddTimes(int64_t chunk) {
    const Marks& marks = MarksOf(chunk);
    RETURN_IF_ERROR(marks.end.Synchronize());
    ASSIGN_OR_RETURN(const double attention, Between(marks.begin, marks.attended));
    ASSIGN_OR_RETURN(const double after, Between(marks.attended, marks.end));
    times_.attention += attention;
    times_.projections += after;
    return absl::OkStatus();
  }

  absl::Status AddLayerTimes(const Projection& projection, bool rows_only) {
    RETURN_IF_ERROR(projection.projected.Synchronize());
    ASSIGN_OR_RETURN(const double projecting, Between(projection.begin, projection.projected));
    ASSIGN_OR_RETURN(const double copying, Between(projection.copying, projection.copied));
    times_.projections += projecting;
    times_.copy_out += copying;
    if (!rows_only) return absl::OkStatus();  // else copies end before the layer does
    ASSIGN_OR_RETURN(const double waiting, Between(projection.projected, projection.copied));
    times_.copy_out_wait += std::max(0.0, waiting);
    return absl::OkStatus();
  }

  // Of samples [first, first + n) the group of a head, whose q heads are neighbours.
  std::vector<float> TakeQueries(int32_t head, int64_t first, int64_t n) const {
    const int64_t group_width = sizes_.q_width / config_.shape.kv_heads;
    std::vector<float> queries;
    queries.reserve(static_cast<size_t>(n * group_width));
    for (int64_t i = first; i < first + n; ++i) {
      const float* const q = host_samples_.data() + i * sizes_.q_width + head * group_width;
      queries.insert(queries.end(), q, q + group_width);
    }
    return queries;
  }

  ProbeRows TakeProbe() const {
    ProbeRows probe;
    probe.tokens = probe_;
    const int64_t head_rows = probe_ * config_.shape.head_dim;
    for (int32_t head = 0; head < config_.shape.kv_heads; ++head) {
      const uint16_t* const k = host_probe_.data() + head * head_rows;
      probe.k.emplace_back(k, k + head_rows);
      probe.v.emplace_back(k + sizes_.probe_rows, k + sizes_.probe_rows + head_rows);
      probe.queries.push_back(
          TakeQueries(head, static_cast<int64_t>(sample_positions_.size()), probe_));
    }
    return probe;
  }

  LayerRows TakeRows(Layer layer) {
    const std::shared_ptr<void> memory = std::move(ProjectionOf(layer).rows);
    const int64_t head_rows = tokens_ * config_.shape.head_dim;
    uint16_t* const k = static_cast<uint16_t*>(memory.get());
    LayerRows rows;
    rows.layer = layer;
    rows.sample_positions = sample_positions_;
    if (layer.value() > 0) {
      rows.query_drift.assign(host_drift_.data(), host_drift_.data() + sizes_.q_width);
    }
    rows.entering.assign(host_entering_.data(), host_entering_.data() + sizes_.rechecked);
    if (probe_ > 0) rows.probe = TakeProbe();
    for (int32_t head = 0; head < config_.shape.kv_heads; ++head) {
      rows.k.emplace_back(k + head * head_rows, static_cast<size_t>(head_rows), memory);
      rows.v.emplace_back(k + sizes_.rows + head * head_rows, static_cast<size_t>(head_rows),
                          memory);
      rows.queries.push_back(TakeQueries(head, 0, static_cast<int64_t>(sample_positions_.size())));
    }
    return rows;
  }

  const model::ModelConfig config_;
  const AttentionConfig attends_;
  const int64_t tokens_, probe_, all_tokens_;
  const std::vector<Position> sample_positions_, drift_positions_, recheck_positions_;
  const Sizes sizes_;
  std::unique_ptr<CudaBackend> backend_;
  std::unique_ptr<CudaSparseAttention> sparse_;  // null: dense
  Stream copy_stream_;
  cuda::DeviceArena arena_;
  Memory memory_;
  PinnedBuffer<float> host_samples_, host_drift_, host_entering_;
  PinnedBuffer<uint16_t> host_probe_;  // K and V
  std::unique_ptr<PinnedRows> pinned_;
  std::vector<float> host_hidden_, host_before_;
  Marks marks_[kChunksAhead];
  Projection projections_[2];
  Event chunk_projected_;
  int32_t projected_layer_ = -1;
  int32_t run_layer_ = -1;
  ForwardTimes times_;
};

}  // namespace

absl::Status CheckCudaForward(const model::ModelConfig& config) {
  return CudaBackend::Check(config);
}

absl::StatusOr<std::unique_ptr<LayerForward>> MakeCudaForward(const model::Checkpoint& checkpoint,
                                                              const ForwardPlan& plan,
                                                              int64_t gpu_memory,
                                                              int64_t bytes_beside, int rows_ahead,
                                                              ThreadPool* pool) {
  auto forward = std::make_unique<CudaForward>(checkpoint.config, plan);
  RETURN_IF_ERROR(forward->Allocate(checkpoint, gpu_memory, bytes_beside, rows_ahead, pool));
  return forward;
}

void LeaveGpu() { (void)cudaDeviceReset(); }

}  // namespace carrel::prefill
