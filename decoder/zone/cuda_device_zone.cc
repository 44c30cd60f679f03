#include "decoder/zone/cuda_device_zone.h"

#include <algorithm>
#include <cmath>

#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/client/context_rows.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/zone/cuda_zone_work.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"

namespace carrel::decoder {
namespace {

CudaZoneShape ShapeOf(const OpenedContext& context) {
  return {context.shape, context.zone, Budgets(context.selections),
          HeadBudgets(context.selections, context.shape.kv_heads)};
}

}  // namespace

CudaDeviceZone::CudaDeviceZone(const DeviceZoneOptions& options, const OpenedContext& context)
    : method_(options.selector),
      context_(context),
      shape_(ShapeOf(context)),
      scale_(1.0f / std::sqrt(static_cast<float>(context.shape.head_dim))),
      splits_(kernels::DecodeSplits(context.zone.rows(), context.shape.kv_heads)),
      key_(SharedZoneKey(context, "device", method_, shape_)),
      prompt_takes_all_(PromptTakesAll(context.config, context.device)) {}

const HostRows* CudaDeviceZone::RowsForSelector() const {
  return SelectorNeedsHostRows(method_) ? context_.rows.get() : nullptr;
}

CudaDeviceZone::Memory CudaDeviceZone::Lay(cuda::DeviceArena& arena) const {
  const AttentionShape& heads = shape_.heads;
  Memory memory;
  memory.workspace = arena.Take<uint8_t>(static_cast<int64_t>(
      kernels::DecodeWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, splits_)));
  if (context_.config.estimate == Estimate::kOn && shape_.largest_budget() > 0)
    memory.summaries = CudaSummaries(shape_, *context_.rows, arena);
  return memory;
}

absl::StatusOr<int64_t> CudaDeviceZone::Bytes() const {
  int64_t selector = 0;
  if (shape_.largest_budget() > 0) {
    ASSIGN_OR_RETURN(selector, CudaRowSelectorBytes(method_, shape_, RowsForSelector()));
    if (shares_selector()) {
      ASSIGN_OR_RETURN(const int64_t own, CudaAnotherBytes(method_, shape_, RowsForSelector()));
      selector += own;
    }
  }
  return selector + CudaWindow::Bytes(shape_.heads, shape_.zone.rows()) +
         cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
}

absl::StatusOr<int64_t> CudaDeviceZone::ShareableBytes() const {
  if (key_.empty()) return 0;
  const int64_t rows = CudaWindow::Bytes(shape_.heads, shape_.zone.rows());
  if (!shares_selector()) return rows;
  ASSIGN_OR_RETURN(const int64_t selector,
                   CudaRowSelectorBytes(method_, shape_, RowsForSelector()));
  return rows + selector;
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> CudaDeviceZone::MakeSelector(
    const CudaWindow& values, const cuda::Stream& stream) const {
  CudaKeys keys;
  for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
    keys.layers.push_back(values.kv(layer));
  }
  return MakeCudaRowSelector(method_, shape_, keys, RowsForSelector(), context_.pool, stream);
}

CudaShared<CudaDeviceZone::Parts>::Made CudaDeviceZone::MakeParts(
    const cuda::Stream& stream) const {
  const RowRange zone = shape_.zone;
  auto parts = std::make_shared<Parts>();
  ASSIGN_OR_RETURN(const int64_t bytes, ShareableBytes());
  parts->reserved = model::GpuReservation(bytes);
  ASSIGN_OR_RETURN(parts->values, CudaWindow::Create(shape_.heads, zone.rows()));
  RETURN_IF_ERROR(ReadContextRows(context_.client, shape_.heads, {&zone, 1},
                                  context_.max_fetch_rows, [&](const ContextRows& block) {
                                    return parts->values.CopyRows(block.layer, block.head,
                                                                  block.first - zone.begin,
                                                                  block.rows, block.k, block.v);
                                  }));
  if (shares_selector()) {
    ASSIGN_OR_RETURN(parts->selector, MakeSelector(parts->values, stream));
  }
  return parts;
}

absl::Status CudaDeviceZone::Load(int64_t, const cuda::Stream& stream) {
  ASSIGN_OR_RETURN(parts_, CudaShared<Parts>::Of(key_, [&] { return MakeParts(stream); }));
  ASSIGN_OR_RETURN(arena_,
                   cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { memory_ = Lay(arena); }));
  if (shape_.largest_budget() == 0) return absl::OkStatus();
  if (shares_selector()) {
    ASSIGN_OR_RETURN(selector_, parts_->selector->Another());
  } else {
    ASSIGN_OR_RETURN(selector_, MakeSelector(parts_->values, stream));
  }
  if (memory_.summaries.empty()) return absl::OkStatus();
  return memory_.summaries.Load(*context_.rows, context_.pool);
}

int64_t CudaDeviceZone::attended(Layer layer) const {
  const int64_t heads = shape_.heads.kv_heads;
  if (shape_.dense(layer) || takes_all()) return heads * shape_.zone.rows();
  const CudaSelection selection = selector_->selection(layer);
  return selection.total_rows >= 0 ? selection.total_rows : heads * selection.rows;
}

void CudaDeviceZone::Count(int64_t n, std::vector<LayerStatistics>& layers) const {
  CudaZoneAttention::Count(n, layers);
  if (!takes_all()) return;
  for (LayerStatistics& layer : layers) {
    layer.whole_tokens += n;
    layer.whole_rows += n * shape_.heads.kv_heads * shape_.zone.rows();
  }
}

absl::Status CudaDeviceZone::AttendPrompt(Layer layer, const CudaQueries& queries,
                                          const CudaPartial& to, const cuda::Stream& stream) const {
  kernels::PrefillAttentionCudaParams params;
  params.q = queries.rounded;
  params.kv = kv(layer);
  params.n = queries.n;
  params.rows = params.first_position = shape_.zone.rows();
  params.q_heads = shape_.heads.q_heads;
  params.kv_heads = shape_.heads.kv_heads;
  params.head_dim = shape_.heads.head_dim;
  params.scale = scale_;
  params.out_exact = to.out;
  params.lse = to.lse;
  RETURN_IF_CUDA_ERROR(kernels::PrefillAttentionCuda(params, stream.get()));
  return absl::OkStatus();
}

absl::Status CudaDeviceZone::Attend(Layer layer, const CudaQueries& queries, int64_t phase,
                                    const CudaPartial& to, const cuda::Stream& stream) {
  if (takes_all()) return AttendPrompt(layer, queries, to, stream);
  const int64_t heads = shape_.heads.q_heads, width = heads * shape_.heads.head_dim;
  for (int64_t i = 0; i < queries.n; ++i) {
    RETURN_IF_ERROR(AttendToken(layer, queries.rounded + i * width, phase, to.out + i * width,
                                to.lse + i * heads, stream));
  }
  return absl::OkStatus();
}

kernels::WindowAttentionCudaParams CudaDeviceZone::ToAll(Layer layer, const uint16_t* q,
                                                         const CudaPartial& to) const {
  const AttentionShape& heads = shape_.heads;
  kernels::WindowAttentionCudaParams params;
  params.q = q;
  params.kv = kv(layer);
  params.kv_heads = heads.kv_heads;
  params.group = heads.group();
  params.head_dim = heads.head_dim;
  params.rows = shape_.zone.rows();
  params.scale = scale_;
  params.out = to.out;
  params.lse = to.lse;
  params.splits = splits_;
  params.workspace = memory_.workspace;
  return params;
}

kernels::SparseAttentionCudaParams CudaDeviceZone::ToChosen(Layer layer, const uint16_t* q,
                                                            const CudaPartial& to) const {
  const AttentionShape& heads = shape_.heads;
  const CudaSelection selection = selector_->selection(layer);
  kernels::SparseAttentionCudaParams params;
  params.q = q;
  params.kv = kv(layer);
  params.ids = selection.ids;
  params.kv_heads = heads.kv_heads;
  params.group = heads.group();
  params.head_dim = heads.head_dim;
  params.ids_stride = selection.stride;
  params.rows = selection.rows;
  params.row_count = selection.row_count;
  params.scale = scale_;
  params.out = to.out;
  params.lse = to.lse;
  params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, heads.kv_heads));
  params.workspace = memory_.workspace;
  return params;
}

bool CudaDeviceZone::AddWork(Layer layer, const uint16_t* q, const CudaPartial& to,
                             CudaZoneWork& work) const {
  if (shape_.dense(layer)) {
    work.to_all.push_back(ToAll(layer, q, to));
    return true;
  }
  if (!memory_.summaries.empty()) return false;
  const CudaAttendSelected attend{to.out, to.lse};
  const bool attends = selector_->attends(layer);
  if (!selector_->AddChoice(layer, q, attends ? &attend : nullptr, work.choices)) return false;
  if (!attends) work.to_chosen.push_back(ToChosen(layer, q, to));
  return true;
}

absl::Status CudaDeviceZone::AttendToken(Layer layer, const uint16_t* q, int64_t phase, float* out,
                                         float* lse, const cuda::Stream& stream) const {
  if (shape_.dense(layer)) {
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(ToAll(layer, q, {out, lse}), stream.get()));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(AttendChosen(layer, q, phase, out, lse, stream));
  if (memory_.summaries.empty()) return absl::OkStatus();
  return memory_.summaries.Attend(layer, q, selector_->selection(layer), {kv(layer)}, out, lse,
                                  stream);
}

absl::Status CudaDeviceZone::AttendChosen(Layer layer, const uint16_t* q, int64_t phase, float* out,
                                          float* lse, const cuda::Stream& stream) const {
  if (selector_->attends(layer)) {
    return selector_->SelectAndAttend(layer, q, phase, {out, lse}, stream);
  }
  RETURN_IF_ERROR(selector_->Select(layer, q, phase, stream));
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(ToChosen(layer, q, {out, lse}), stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
