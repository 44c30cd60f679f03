#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "common/cuda/buffer.h"
#include "common/cuda/graph.h"
#include "common/cuda/runtime.h"
#include "common/cuda/status.h"
#include "common/cuda/stream.h"
#include "common/status.h"
#include "decoder/plan/rates.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/window/cuda_window.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/of_heads.h"
#include "model/cuda_backend.h"
#include "model/cuda_weights.h"

namespace carrel::decoder {
namespace {

constexpr double kBesideSelection = 45e-6;  // seconds

// One layer's rows on the device, made up, and what attends to them.
class MadeUpLayer {
 public:
  static absl::StatusOr<std::unique_ptr<MadeUpLayer>> Create(const AttentionShape& of_model,
                                                             int64_t rows, int64_t budget) {
    auto layer = std::make_unique<MadeUpLayer>();
    layer->shape_ = {of_model, {0, rows}, {budget > 0 ? budget : kAllRows}};
    layer->shape_.heads.layers = 1;
    const AttentionShape& heads = layer->shape_.heads;
    ASSIGN_OR_RETURN(layer->stream_, cuda::Stream::Create());
    ASSIGN_OR_RETURN(layer->rows_, CudaWindow::Create(heads, rows));
    const int64_t width = int64_t{heads.q_heads} * heads.head_dim;
    ASSIGN_OR_RETURN(layer->q_, cuda::DeviceBuffer<uint16_t>::Create(width));
    ASSIGN_OR_RETURN(layer->out_, cuda::DeviceBuffer<float>::Create(width));
    ASSIGN_OR_RETURN(layer->lse_, cuda::DeviceBuffer<float>::Create(heads.q_heads));
    layer->splits_ = kernels::DecodeSplits(rows, heads.kv_heads);
    ASSIGN_OR_RETURN(
        layer->workspace_,
        cuda::DeviceBuffer<uint8_t>::Create(static_cast<int64_t>(kernels::DecodeWorkspaceBytes(
            heads.kv_heads, heads.group(), heads.head_dim, layer->splits_))));
    RETURN_IF_ERROR(layer->Fill());
    if (budget == 0) return layer;
    CudaKeys keys;
    keys.layers = {layer->rows_.kv(Layer(0))};
    ASSIGN_OR_RETURN(layer->selector_, MakeCudaRowSelector(SelectorConfig(), layer->shape_, keys,
                                                           nullptr, nullptr, layer->stream_));
    return layer;
  }

  // Of one token, over many of them.
  absl::StatusOr<double> Seconds() {
    constexpr int kTokens = 32, kTimes = 3;
    RETURN_IF_ERROR(Attend());  // loads the kernels
    RETURN_IF_ERROR(stream_.Synchronize());
    ASSIGN_OR_RETURN(const cuda::Graph graph, cuda::Graph::Capture(stream_, [&]() -> absl::Status {
                       for (int i = 0; i < kTokens; ++i) RETURN_IF_ERROR(Attend());
                       return absl::OkStatus();
                     }));
    ASSIGN_OR_RETURN(const cuda::EventTimer timer, cuda::EventTimer::Create());
    float best = INFINITY;
    for (int i = 0; i < kTimes; ++i) {
      RETURN_IF_ERROR(timer.Start(stream_));
      RETURN_IF_ERROR(graph.Launch(stream_));
      RETURN_IF_ERROR(timer.Stop(stream_));
      ASSIGN_OR_RETURN(const float us, timer.ElapsedUs());
      best = std::min(best, us);
    }
    return 1e-6 * best / kTokens;
  }

 private:
  // Numbers near 1 of both signs, different from row to row.
  absl::Status Fill() {
    const AttentionShape& heads = shape_.heads;
    const int64_t rows = shape_.zone.rows();
    std::vector<uint16_t> numbers(
        static_cast<size_t>(std::max(rows, int64_t{heads.q_heads}) * heads.head_dim));
    uint32_t state = 12345;
    for (uint16_t& x : numbers) {
      state = state * 1664525u + 1013904223u;
      x = static_cast<uint16_t>((state >> 16 & 0x807f) | 0x3f00);
    }
    for (int32_t head = 0; head < heads.kv_heads; ++head) {
      RETURN_IF_ERROR(
          rows_.CopyRows(Layer(0), KvHead(head), 0, rows, numbers.data(), numbers.data()));
    }
    RETURN_IF_CUDA_ERROR(cudaMemset(workspace_.data(), 0, static_cast<size_t>(workspace_.bytes())));
    RETURN_IF_CUDA_ERROR(cudaMemcpy(q_.data(), numbers.data(), static_cast<size_t>(q_.bytes()),
                                    cudaMemcpyHostToDevice));
    RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // our stream does not wait for that one
    return absl::OkStatus();
  }

  template <class Params>
  Params Common() const {
    auto params = kernels::OfHeads<Params>(shape_.heads);
    params.q = q_.data();
    params.kv = rows_.kv(Layer(0));
    params.out = out_.data();
    params.lse = lse_.data();
    params.workspace = workspace_.data();
    return params;
  }

  absl::Status Attend() const {
    if (selector_ == nullptr) {
      auto params = Common<kernels::WindowAttentionCudaParams>();
      params.rows = shape_.zone.rows();
      params.splits = splits_;
      RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(params, stream_.get()));
      return absl::OkStatus();
    }
    CudaChoice choice = {Layer(0), q_.data()};
    if (selector_->attends(Layer(0))) choice.attend = {out_.data(), lse_.data()};
    RETURN_IF_ERROR(selector_->Select(choice, stream_));
    if (selector_->attends(Layer(0))) return absl::OkStatus();
    const CudaSelection selection = selector_->selection(Layer(0));
    auto params = Common<kernels::SparseAttentionCudaParams>();
    params.ids = selection.ids;
    params.ids_stride = selection.stride;
    params.rows = selection.rows;
    params.row_count = selection.row_count;
    params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, shape_.heads.kv_heads));
    RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(params, stream_.get()));
    return absl::OkStatus();
  }

  CudaZoneShape shape_;
  cuda::Stream stream_;
  CudaWindow rows_;
  cuda::DeviceBuffer<uint16_t> q_;
  cuda::DeviceBuffer<float> out_, lse_;
  cuda::DeviceBuffer<uint8_t> workspace_;
  int64_t splits_ = 0;
  std::unique_ptr<CudaRowSelector> selector_;  // null: all rows
};

absl::StatusOr<TimedLayer> TimeLayer(const AttentionShape& shape, int64_t rows, int64_t budget) {
  ASSIGN_OR_RETURN(const std::unique_ptr<MadeUpLayer> layer,
                   MadeUpLayer::Create(shape, rows, budget));
  ASSIGN_OR_RETURN(const double seconds, layer->Seconds());
  return TimedLayer{static_cast<double>(rows),
                    static_cast<double>(shape.kv_heads * (budget > 0 ? budget : rows)), seconds};
}

}  // namespace

absl::StatusOr<std::string> GpuName() {
  int device = 0;
  cudaDeviceProp properties;
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, device));
  return std::string(properties.name);
}

absl::StatusOr<int64_t> GpuMemory() {
  size_t free = 0, total = 0;
  RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(total);
}

int64_t GpuModelBytes(const model::ModelConfig& config, const DeviceConfig& device,
                      int64_t window_rows) {
  constexpr int64_t kBlock = 256, kBeside = int64_t{64} << 20;  // logits, graphs, workspaces
  return model::CudaWeights::Bytes(config) + model::CudaBackend::ScratchBytes(config, kBlock) +
         CudaWindow::Bytes(config.shape, window_rows + device.new_tokens) + kBeside;
}

absl::Status MeasureCudaRates(const AttentionShape& shape, ThreadPool*, Rates& rates) {
  constexpr int64_t kShort = 4096, kMostBytes = int64_t{192} << 20, kFew = 128, kMany = 1024;
  const int64_t row_bytes = int64_t{shape.kv_heads} * shape.head_dim * 4;
  const int64_t rows = std::clamp<int64_t>(kMostBytes / row_bytes, 4 * kShort, 131072);
  ASSIGN_OR_RETURN(const TimedLayer dense_short, TimeLayer(shape, kShort, 0));
  ASSIGN_OR_RETURN(const TimedLayer dense_long, TimeLayer(shape, rows, 0));
  ASSIGN_OR_RETURN(const TimedLayer few_short, TimeLayer(shape, kShort, kFew));
  ASSIGN_OR_RETURN(const TimedLayer few_long, TimeLayer(shape, rows, kFew));
  ASSIGN_OR_RETURN(const TimedLayer many_long, TimeLayer(shape, rows, kMany));
  const double chosen_row = std::max(
      0.0, (many_long.seconds - few_long.seconds) / (many_long.chosen_rows - few_long.chosen_rows));
  WayRate& dense = rates.of({Place::kDevice, true});
  dense = FitRate(dense_short, dense_long, 0);
  WayRate& selected = rates.of({Place::kDevice, false});
  selected = FitRate(few_short, few_long, chosen_row);
  // The estimation term: one more launch, and the summaries' bytes. Beside the kernels that were timed a layer that selects
  // merges its parts and keeps budgets: on an H200 it took 30 to 60 us more than these in steps of four shapes
  // (bench/results: plans, ways).
  selected.fixed += dense.fixed + kBesideSelection;
  selected.zone_row += kSummaryOfRow * dense.zone_row;
  return absl::OkStatus();
}

}  // namespace carrel::decoder
