#include "decoder/runner/cuda_sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/client/row_stream.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/zone/make_zone.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {

CudaSequence::CudaSequence(const OpenedContext& context, std::shared_ptr<Runner> runner,
                           int64_t weight_bytes)
    : Sequence(context.tokens),
      runner_(std::move(runner)),
      context_(context),
      block_(std::min(kBlockTokens, new_tokens_)),
      splits_(kernels::DecodeSplits(context_rows() + new_tokens_, shape_.kv_heads)),
      most_given_up_(MostGivenUp(context.config, context.device, context.tokens)),
      weight_bytes_(weight_bytes) {}

void CudaSequence::Lay(cuda::DeviceArena& arena) {
  workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(
      kernels::DecodeWorkspaceBytes(shape_.kv_heads, shape_.group(), shape_.head_dim, splits_)));
  const int64_t tokens = predicted_tokens();
  if (tokens == 0) return;
  for (Drift* of : {&drift_, &stored_drift_}) {
    of->mean = arena.Take<float>(shape_.layers * width());
    of->tokens = arena.Take<int32_t>(shape_.layers * shape_.q_heads);
  }
  predicted_ = {arena.Take<float>(2 * tokens * width()),
                arena.Take<uint16_t>(2 * tokens * width())};
}

absl::Status CudaSequence::Plan(int64_t runner_bytes, int64_t runner_lacks) {
  ASSIGN_OR_RETURN(zone_, MakeCudaZone(context_));
  ASSIGN_OR_RETURN(const CudaZoneBytes zone, zone_->Bytes());
  const int64_t own = CudaWindow::Bytes(shape_, context_rows() + new_tokens_) + zone.all +
                      cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
  runner_bytes_ = runner_bytes;
  bytes_ = runner_bytes + own;
  const int64_t held = zone.shared_now ? zone.shareable : 0;
  RETURN_IF_ERROR(model::CheckGpuMemory(model::GpuReservation::all() + runner_lacks + own - held,
                                        context_.device.gpu_memory));
  reserved_ = model::GpuReservation(own - zone.shareable);
  return absl::OkStatus();
}

absl::Status CudaSequence::Load(const cuda::Stream& stream) {
  ASSIGN_OR_RETURN(window_, CudaWindow::Create(shape_, context_rows() + new_tokens_));
  ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { Lay(arena); }));
  if (context_.client != nullptr) {
    RETURN_IF_ERROR(Annotate(LoadContextRows(), "reading rows of the context"));
    RETURN_IF_ERROR(CopyLastRows(cudaMemcpyDeviceToHost));
    RETURN_IF_ERROR(zone_->Load(block_, stream));
  }
  return predicted_tokens() > 0 ? LoadDrift() : absl::OkStatus();
}

absl::Status CudaSequence::LoadContextRows() {
  const RowRange ranges[] = {{0, context_.zone.begin}, {context_.zone.end, context_.tokens}};
  return ReadContextRows(
      context_.client, shape_, [&](Layer) { return absl::MakeConstSpan(ranges); },
      context_.max_fetch_rows,
      [&](const ContextRows& block) {
        const int64_t at =
            block.first < context_.zone.begin ? block.first : block.first - context_.zone.rows();
        return window_.CopyRows(block.layer, block.head, at, block.rows, block.k, block.v);
      });
}

absl::Status CudaSequence::CopyLastRows(cudaMemcpyKind to) {
  if (most_given_up_ == 0) return absl::OkStatus();
  const int64_t heads = 2 * int64_t{shape_.layers} * shape_.kv_heads, d = shape_.head_dim;
  last_rows_.resize(static_cast<size_t>(heads * most_given_up_ * d));
  const auto bytes = static_cast<size_t>(most_given_up_ * d) * sizeof(kernels::Bf16);
  const kernels::KvRows window = window_.kv(Layer(0));
  const auto pitch = static_cast<size_t>(window.row_stride * d) * sizeof(kernels::Bf16);
  kernels::Bf16* const rows = window.k + (context_rows() - most_given_up_) * d;
  const bool here = to == cudaMemcpyDeviceToHost;
  RETURN_IF_CUDA_ERROR(here ? cudaMemcpy2D(last_rows_.data(), bytes, rows, pitch, bytes,
                                           static_cast<size_t>(heads), to)
                            : cudaMemcpy2D(rows, pitch, last_rows_.data(), bytes, bytes,
                                           static_cast<size_t>(heads), to));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // our streams do not wait for that one
  return absl::OkStatus();
}

absl::Status CudaSequence::LoadDrift() {
  const StoredDrift& stored = context_.drift;
  std::vector<float> drift(static_cast<size_t>(shape_.layers * width()));
  std::vector<int32_t> counts(static_cast<size_t>(shape_.layers * shape_.q_heads));
  for (size_t l = 0; l < stored.size(); ++l) {
    if (stored[l].empty()) continue;
    std::copy(stored[l].begin(), stored[l].end(), &drift[l * stored[l].size()]);
    std::fill_n(&counts[l * static_cast<size_t>(shape_.q_heads)], shape_.q_heads,
                kStoredDriftTokens);
  }
  RETURN_IF_ERROR(CopyToDevice(stored_drift_.mean, drift));
  return CopyToDevice(stored_drift_.tokens, counts);
}

absl::Status CudaSequence::ResetDrift(const cuda::Stream& stream) const {
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream.get());
  };
  const auto heads = static_cast<size_t>(shape_.layers * shape_.q_heads);
  RETURN_IF_CUDA_ERROR(copy(drift_.mean, stored_drift_.mean,
                            heads * static_cast<size_t>(shape_.head_dim) * sizeof(float)));
  RETURN_IF_CUDA_ERROR(copy(drift_.tokens, stored_drift_.tokens, heads * sizeof(int32_t)));
  return absl::OkStatus();
}

absl::Status CudaSequence::Check(const Slice& slice) const {
  RETURN_IF_ERROR(CheckWanted());
  const auto n = static_cast<int64_t>(slice.tokens.size());
  CARREL_CHECK(n >= 1 && n <= block_);
  const int64_t wanted = end() + n - context_.tokens;
  if (wanted <= new_tokens_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the GPU's window has room for ", new_tokens_,
                                                   " new tokens (gpu_new_tokens); ", wanted,
                                                   " are needed"));
}

absl::Status CudaSequence::Begin(const Slice& slice, const cuda::Stream& stream) {
  of_prompt_ = slice.of_prompt;
  if (of_prompt_) generated_ = 0;
  zone_->set_reading_prompt(of_prompt_);
  if (overwritten_) RETURN_IF_ERROR(CopyLastRows(cudaMemcpyHostToDevice));
  overwritten_ = false;
  if (!tokens().empty() || predicted_tokens() == 0) return absl::OkStatus();
  return ResetDrift(stream);
}

void CudaSequence::Passed(const Slice& slice) {
  zone_->Count(static_cast<int64_t>(slice.tokens.size()));
  if (!of_prompt_) generated_ += static_cast<int64_t>(slice.tokens.size());
  writes_over_ = writes_over_ || given_up() > 0;
  Took(slice.tokens);
}

// New rows begin where the first one that was given up lies.
void CudaSequence::Start(int64_t) {
  zone_->Cancel();
  overwritten_ = overwritten_ || std::exchange(writes_over_, false);
}

kernels::WindowAttentionCudaParams CudaSequence::ToWindow(Layer layer, const uint16_t* q,
                                                          const int32_t* row_count,
                                                          const CudaPartial& to) const {
  auto params = kernels::OfHeads<kernels::WindowAttentionCudaParams>(shape_);
  params.q = q;
  params.kv = window_.kv(layer);
  params.row_count = row_count;
  params.out = to.out;
  params.lse = to.lse;
  params.splits = splits_;
  params.workspace = workspace_;
  return params;
}

absl::Status CudaSequence::LearnDrift(Layer layer, const float* q, int64_t n, const int32_t* step,
                                      const float* inv_freq, const cuda::Stream& stream) const {
  kernels::QueryDriftCudaParams params;
  params.q = q;
  params.predicted_q = predicted(layer).exact;
  params.n = n;
  params.heads = shape_.q_heads;
  params.head_dim = shape_.head_dim;
  params.first_position = context_.tokens;
  params.step = step;
  params.inv_freq = inv_freq;
  params.newest = kNewestDrift;
  params.mean = drift_.mean + layer.value() * width();
  params.tokens = drift_.tokens + layer.value() * shape_.q_heads;
  RETURN_IF_CUDA_ERROR(kernels::LearnQueryDriftCuda(params, stream.get()));
  return absl::OkStatus();
}

Statistics CudaSequence::statistics() const {
  Statistics statistics;
  statistics.layers = zone_->statistics();
  if (context_.client != nullptr) {
    statistics.bytes_sent = context_.client->bytes_sent();
    statistics.bytes_received = context_.client->bytes_received();
  }
  statistics.window_bytes = window_.bytes();
  statistics.weight_bytes = weight_bytes_;
  statistics.shared_bytes = runner_bytes_;
  statistics.device_bytes = bytes_;
  return statistics;
}

}  // namespace carrel::decoder
