#include "decoder/zone/cuda_device_zone.h"

#include <algorithm>
#include <cmath>

#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/client/context_rows.h"
#include "decoder/select/cuda_methods.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"

namespace carrel::decoder {
namespace {

CudaZoneShape ShapeOf(const RetrievalConfig& config, const AttentionShape& heads, RowRange zone) {
  CudaZoneShape shape{heads, zone, LayerBudgets(config, heads.layers, zone.rows())};
  if (config.select == Select::kFidelity) shape.head_budgets = config.head_rows;
  return shape;
}

const HostRows* RowsForSelector(const RetrievalConfig& config, const HostRows* host_rows) {
  return SelectorNeedsHostRows(*config.selector) ? host_rows : nullptr;
}

}  // namespace

absl::StatusOr<int64_t> CudaDeviceZone::Bytes(const RetrievalConfig& config,
                                              const AttentionShape& heads, RowRange zone,
                                              const HostRows* host_rows) {
  const CudaZoneShape shape = ShapeOf(config, heads, zone);
  int64_t selector = 0;
  if (shape.largest_budget() > 0) {
    ASSIGN_OR_RETURN(selector, CudaRowSelectorBytes(*config.selector, shape,
                                                    RowsForSelector(config, host_rows)));
    if (config.estimate == Estimate::kOn) selector += CudaSummaries::Bytes(shape, *host_rows);
  }
  const int64_t splits = kernels::DecodeSplits(zone.rows(), heads.kv_heads);
  return selector + CudaWindow::Bytes(heads, zone.rows()) +
         static_cast<int64_t>(
             kernels::DecodeWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, splits));
}

absl::StatusOr<CudaDeviceZone> CudaDeviceZone::Create(const RetrievalConfig& config,
                                                      const AttentionShape& heads, RowRange zone,
                                                      int64_t max_fetch_rows, StoreClient* client,
                                                      const HostRows* host_rows, ThreadPool* pool,
                                                      const cuda::Stream& stream) {
  CudaDeviceZone out;
  out.shape_ = ShapeOf(config, heads, zone);
  out.scale_ = 1.0f / std::sqrt(static_cast<float>(heads.head_dim));
  out.splits_ = kernels::DecodeSplits(zone.rows(), heads.kv_heads);
  ASSIGN_OR_RETURN(out.values_, CudaWindow::Create(heads, zone.rows()));
  ASSIGN_OR_RETURN(out.workspace_,
                   ZeroedDeviceBytes(kernels::DecodeWorkspaceBytes(heads.kv_heads, heads.group(),
                                                                   heads.head_dim, out.splits_)));
  RETURN_IF_ERROR(
      ReadContextRows(client, heads, {&zone, 1}, max_fetch_rows, [&](const ContextRows& block) {
        return out.values_.CopyRows(block.layer, block.head, block.first - zone.begin, block.rows,
                                    block.k, block.v);
      }));
  if (out.shape_.largest_budget() == 0) return out;
  CudaKeys keys;
  keys.row_stride = zone.rows();
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    keys.layers.push_back(out.values_.k(layer));
  }
  ASSIGN_OR_RETURN(out.selector_,
                   MakeCudaRowSelector(*config.selector, out.shape_, keys,
                                       RowsForSelector(config, host_rows), pool, stream));
  if (config.estimate == Estimate::kOn) {
    ASSIGN_OR_RETURN(out.summaries_, CudaSummaries::Create(out.shape_, *host_rows, pool));
  }
  return out;
}

int64_t CudaDeviceZone::attended(Layer layer) const {
  const int64_t heads = shape_.heads.kv_heads;
  if (shape_.dense(layer)) return heads * shape_.zone.rows();
  const CudaSelection selection = selector_->selection(layer);
  return selection.total_rows >= 0 ? selection.total_rows : heads * selection.rows;
}

absl::Status CudaDeviceZone::Attend(Layer layer, const uint16_t* q, int64_t phase, float* out,
                                    float* lse, const cuda::Stream& stream) const {
  const AttentionShape& heads = shape_.heads;
  if (shape_.dense(layer)) {
    kernels::WindowAttentionCudaParams params;
    params.q = q;
    params.k = values_.k(layer);
    params.v = values_.v(layer);
    params.kv_heads = heads.kv_heads;
    params.group = heads.group();
    params.head_dim = heads.head_dim;
    params.row_stride = params.rows = shape_.zone.rows();
    params.scale = scale_;
    params.out = out;
    params.lse = lse;
    params.splits = splits_;
    params.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(params, stream.get()));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(AttendChosen(layer, q, phase, out, lse, stream));
  if (summaries_.empty()) return absl::OkStatus();
  const CudaSummaries::SelectedRows rows{values_.k(layer), values_.v(layer), shape_.zone.rows()};
  return summaries_.Attend(layer, q, selector_->selection(layer), rows, out, lse, stream);
}

absl::Status CudaDeviceZone::AttendChosen(Layer layer, const uint16_t* q, int64_t phase, float* out,
                                          float* lse, const cuda::Stream& stream) const {
  if (selector_->attends(layer)) {
    return selector_->SelectAndAttend(layer, q, phase, {values_.v(layer), out, lse}, stream);
  }
  const AttentionShape& heads = shape_.heads;
  RETURN_IF_ERROR(selector_->Select(layer, q, phase, stream));
  const CudaSelection selection = selector_->selection(layer);
  kernels::SparseAttentionCudaParams params;
  params.q = q;
  params.k = values_.k(layer);
  params.v = values_.v(layer);
  params.ids = selection.ids;
  params.kv_heads = heads.kv_heads;
  params.group = heads.group();
  params.head_dim = heads.head_dim;
  params.row_stride = shape_.zone.rows();
  params.ids_stride = selection.stride;
  params.rows = selection.rows;
  params.row_count = selection.row_count;
  params.scale = scale_;
  params.out = out;
  params.lse = lse;
  params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, heads.kv_heads));
  params.workspace = workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(params, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
