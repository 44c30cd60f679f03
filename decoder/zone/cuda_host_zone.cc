#include "decoder/zone/cuda_host_zone.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/host_rows.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"

namespace carrel::decoder {
namespace {

// Of the method; of its fork, where rows are fetched ahead.
CudaZoneShape ShapeOf(const BankPlan& plan, const AttentionShape& heads, RowRange zone,
                      bool ahead) {
  CudaZoneShape shape{heads, zone, {}};
  for (size_t l = 0; l < plan.attended.size(); ++l) {
    const int64_t rows = ahead ? plan.ahead[l] : plan.chooses(l) ? plan.attended[l] : 0;
    shape.budgets.push_back(rows == 0 ? kAllRows : rows);
  }
  return shape;
}

// Layers whose rows are read by attention alone, a few at a time.
std::vector<bool> PackedLayers(const BankPlan& plan, const SelectorConfig& selector) {
  std::vector<bool> packed;
  for (size_t l = 0; l < plan.attended.size(); ++l) {
    packed.push_back(plan.chooses(l) && !plan.holds_all(l) && !SelectorReadsKeys(selector));
  }
  return packed;
}

// The most rows that a packed layer without a bank attends to; 0: there is none.
int64_t MostGathered(const BankPlan& plan, const SelectorConfig& selector) {
  const std::vector<bool> packed = PackedLayers(plan, selector);
  int64_t most = 0;
  for (size_t l = 0; l < packed.size(); ++l) {
    if (packed[l] && !plan.has_bank(l)) most = std::max(most, plan.attended[l]);
  }
  return most;
}

int64_t GatheredElements(const AttentionShape& shape, int64_t rows) {  // of K, and of V
  return shape.kv_heads * rows * shape.head_dim;
}

int64_t AttentionWorkspaceBytes(const AttentionShape& shape, int64_t rows) {
  return static_cast<int64_t>(kernels::DecodeWorkspaceBytes(
      shape.kv_heads, shape.group(), shape.head_dim,
      kernels::DecodeSplits(std::max<int64_t>(1, rows), shape.kv_heads)));
}

}  // namespace

absl::StatusOr<int64_t> CudaHostZone::Bytes(const BankPlan& plan, const BankConfig& bank,
                                            const SelectorConfig& given, bool estimate,
                                            const AttentionShape& shape, RowRange zone,
                                            const HostRows* host_rows) {
  const SelectorConfig selector = WithOversample(given, 1);  // keys cross the bus
  int64_t bytes = AttentionWorkspaceBytes(shape, plan.rows) +
                  shape.layers * static_cast<int64_t>(sizeof(kernels::RowBankCounters)) +
                  CudaZoneRows::Bytes(shape) +
                  GatheredElements(shape, MostGathered(plan, selector)) * 2 * 2;
  for (const int64_t slots : plan.slots) bytes += BankBytes(shape, bank.map, plan.rows, slots);
  for (const int64_t most : {plan.most_chosen(), plan.most_ahead()}) {
    if (most == 0) continue;
    bytes += shape.kv_heads * most * 4 +
             static_cast<int64_t>(kernels::RowBankWorkspaceBytes(shape.kv_heads, most));
  }
  if (plan.most_chosen() > 0) {
    ASSIGN_OR_RETURN(const int64_t method,
                     CudaRowSelectorBytes(selector, ShapeOf(plan, shape, zone, false),
                                          SelectorNeedsHostRows(selector) ? host_rows : nullptr));
    bytes += method;
    if (estimate) bytes += CudaSummaries::Bytes(ShapeOf(plan, shape, zone, false), *host_rows);
  }
  if (plan.most_ahead() > 0) {
    ASSIGN_OR_RETURN(const int64_t fork,
                     CudaForkBytes(selector, ShapeOf(plan, shape, zone, true),
                                   SelectorNeedsHostRows(selector) ? host_rows : nullptr));
    bytes += fork + 2 * int64_t{shape.q_heads} * shape.head_dim * 2;
  }
  return bytes;
}

absl::StatusOr<CudaHostZone> CudaHostZone::Create(const BankPlan& plan, const BankConfig& bank,
                                                  const SelectorConfig& given, bool estimate,
                                                  const AttentionShape& shape, RowRange zone,
                                                  int64_t max_fetch_rows, StoreClient* client,
                                                  const HostRows* rows, ThreadPool* pool,
                                                  const cuda::Stream& stream) {
  CARREL_CHECK(zone.rows() == plan.rows);
  const SelectorConfig selector = WithOversample(given, 1);
  CudaHostZone out;
  out.plan_ = plan;
  out.bank_ = bank;
  out.shape_ = shape;
  out.scale_ = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  out.splits_ = kernels::DecodeSplits(plan.rows, shape.kv_heads);
  RETURN_IF_ERROR(out.Allocate());
  ASSIGN_OR_RETURN(out.rows_, CudaZoneRows::Create(shape, zone, PackedLayers(plan, selector),
                                                   max_fetch_rows, client, rows, pool));
  ASSIGN_OR_RETURN(out.gathered_, cuda::DeviceBuffer<uint16_t>::Create(
                                      2 * GatheredElements(shape, MostGathered(plan, selector))));
  RETURN_IF_ERROR(out.MakeSelectors(selector, zone, rows, pool, stream));
  if (estimate && plan.most_chosen() > 0) {
    ASSIGN_OR_RETURN(out.summaries_,
                     CudaSummaries::Create(ShapeOf(plan, shape, zone, false), *rows, pool));
  }
  RETURN_IF_ERROR(out.FillDevice(stream));
  return out;
}

absl::Status CudaHostZone::Allocate() {
  ASSIGN_OR_RETURN(counters_, cuda::DeviceBuffer<kernels::RowBankCounters>::Create(shape_.layers));
  ASSIGN_OR_RETURN(host_counters_,
                   cuda::PinnedBuffer<kernels::RowBankCounters>::Create(shape_.layers));
  ASSIGN_OR_RETURN(
      attention_workspace_,
      ZeroedDeviceBytes(static_cast<size_t>(AttentionWorkspaceBytes(shape_, plan_.rows))));
  int64_t held = 0, state = 0;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    const kernels::RowBankShape bank = BankOf(layer);
    held_at_.push_back(held);
    state_at_.push_back(state);
    held += kernels::RowBankRowBytes(bank) / 2;
    if (plan_.has_bank(Index(layer))) state += kernels::RowBankLayout(bank).bytes;
  }
  ASSIGN_OR_RETURN(held_, cuda::DeviceBuffer<uint16_t>::Create(held));
  ASSIGN_OR_RETURN(state_, cuda::DeviceBuffer<uint8_t>::Create(state));
  if (const int64_t most = plan_.most_chosen(); most > 0) {
    ASSIGN_OR_RETURN(slots_, cuda::DeviceBuffer<int32_t>::Create(shape_.kv_heads * most));
    ASSIGN_OR_RETURN(bank_workspace_, cuda::DeviceBuffer<uint8_t>::Create(static_cast<int64_t>(
                                          kernels::RowBankWorkspaceBytes(shape_.kv_heads, most))));
  }
  const int64_t most_ahead = plan_.most_ahead();
  if (most_ahead == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(ahead_slots_, cuda::DeviceBuffer<int32_t>::Create(shape_.kv_heads * most_ahead));
  ASSIGN_OR_RETURN(ahead_workspace_,
                   cuda::DeviceBuffer<uint8_t>::Create(static_cast<int64_t>(
                       kernels::RowBankWorkspaceBytes(shape_.kv_heads, most_ahead))));
  ASSIGN_OR_RETURN(approximate_q_, cuda::DeviceBuffer<uint16_t>::Create(
                                       2 * int64_t{shape_.q_heads} * shape_.head_dim));
  ASSIGN_OR_RETURN(ahead_stream_, cuda::Stream::Create());
  for (int32_t layer = 0; layer < shape_.layers; ++layer) {
    for (std::vector<cuda::Event>* events : {&query_here_, &rows_here_}) {
      ASSIGN_OR_RETURN(cuda::Event event, cuda::Event::Create());
      events->push_back(std::move(event));
    }
  }
  return absl::OkStatus();
}

absl::Status CudaHostZone::MakeSelectors(const SelectorConfig& selector, RowRange zone,
                                         const HostRows* rows, ThreadPool* pool,
                                         const cuda::Stream& stream) {
  if (plan_.most_chosen() == 0) return absl::OkStatus();
  CudaKeys keys;
  keys.row_stride = plan_.rows;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    keys.layers.push_back(rows_.is_packed(layer) ? nullptr : rows_.k(layer));
  }
  cuda::PinnedBuffer<uint16_t> unpacked;
  keys.unpack = [&](Layer layer) -> absl::StatusOr<const uint16_t*> {
    if (unpacked.size() == 0) {
      ASSIGN_OR_RETURN(unpacked, cuda::PinnedBuffer<uint16_t>::Create(shape_.kv_heads * plan_.rows *
                                                                      shape_.head_dim));
    }
    rows_.UnpackKeys(layer, pool, unpacked.data());
    return unpacked.data();
  };
  ASSIGN_OR_RETURN(selector_, MakeCudaRowSelector(
                                  selector, ShapeOf(plan_, shape_, zone, false), keys,
                                  SelectorNeedsHostRows(selector) ? rows : nullptr, pool, stream));
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    // Blocks and chunks may round a budget.
    if (plan_.has_bank(Index(layer)) && attended(layer) > plan_.attended[Index(layer)]) {
      return absl::InvalidArgumentError(
          absl::StrCat("bank: layer ", layer.value(), " attends to up to ", attended(layer),
                       " rows for a budget of ", plan_.attended[Index(layer)],
                       ": give a top_k that blocks and "
                       "chunks divide"));
    }
  }
  if (plan_.most_ahead() == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(ahead_selector_, selector_->Fork(ShapeOf(plan_, shape_, zone, true).budgets));
  CARREL_CHECK(ahead_selector_ != nullptr);  // ValidateDeviceConfig
  return absl::OkStatus();
}

absl::Status CudaHostZone::FillDevice(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    if (!plan_.holds_all(Index(layer))) continue;
    const int64_t bytes = shape_.kv_heads * plan_.rows * rows_.row_bytes(layer);  // K, then V
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(held_k(layer), rows_.k(layer), static_cast<size_t>(bytes),
                                         cudaMemcpyHostToDevice, stream.get()));
  }
  return Reset(stream);
}

int64_t CudaHostZone::attended(Layer layer) const {
  return plan_.chooses(Index(layer)) ? selector_->selection(layer).rows : plan_.rows;
}

absl::Status CudaHostZone::Reset(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    if (!plan_.has_bank(Index(layer))) continue;
    RETURN_IF_CUDA_ERROR(kernels::RowBankReset(
        BankOf(layer), state_.data() + state_at_[Index(layer)], stream.get()));
  }
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(counters_.data(), 0, static_cast<size_t>(counters_.bytes()), stream.get()));
  RETURN_IF_ERROR(CopyCounters(stream));
  return stream.Synchronize();
}

absl::Status CudaHostZone::CopyCounters(const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_counters_.data(), counters_.data(),
                                       static_cast<size_t>(counters_.bytes()),
                                       cudaMemcpyDeviceToHost, stream.get()));
  return absl::OkStatus();
}

uint16_t* CudaHostZone::held_v(Layer layer) const {
  return held_k(layer) + kernels::RowBankRowBytes(BankOf(layer)) / 4;
}

uint16_t* CudaHostZone::approximate_q(Layer layer) const {
  return approximate_q_.data() + layer.value() % 2 * int64_t{shape_.q_heads} * shape_.head_dim;
}

kernels::RowBankShape CudaHostZone::BankOf(Layer layer) const {
  kernels::RowBankShape bank;
  bank.kv_heads = shape_.kv_heads;
  bank.head_dim = shape_.head_dim;
  bank.slots = plan_.slots[Index(layer)];
  bank.rows = plan_.rows;
  bank.map = bank_.map;
  return bank;
}

kernels::RowBankParams CudaHostZone::UseOf(Layer layer, const CudaSelection& selection,
                                           kernels::RowBankPurpose purpose) const {
  const bool ahead = purpose == kernels::RowBankPurpose::kAhead;
  kernels::RowBankParams use;
  use.shape = BankOf(layer);
  if (rows_.is_packed(layer)) {
    use.packed = rows_.packed(layer);
  } else {
    use.k = rows_.k(layer);
    use.v = rows_.v(layer);
  }
  use.bank_k = held_k(layer);
  use.bank_v = held_v(layer);
  use.state = state_.data() + state_at_[Index(layer)];
  use.ids = selection.ids;
  use.ids_stride = selection.stride;
  use.count = selection.rows;
  use.row_count = selection.row_count;
  use.slots = (ahead ? ahead_slots_ : slots_).data();
  use.purpose = purpose;
  use.counters = counters_.data() + layer.value();
  use.workspace = (ahead ? ahead_workspace_ : bank_workspace_).data();
  return use;
}

absl::Status CudaHostZone::FetchAhead(Layer layer, const cuda::Stream& stream) const {
  const size_t l = Index(layer);
  RETURN_IF_ERROR(query_here_[l].Record(stream));
  RETURN_IF_ERROR(ahead_stream_.WaitFor(query_here_[l]));
  RETURN_IF_ERROR(ahead_selector_->Select(layer, approximate_q(layer), 0, ahead_stream_));
  RETURN_IF_CUDA_ERROR(kernels::UseRowBank(
      UseOf(layer, ahead_selector_->selection(layer), kernels::RowBankPurpose::kAhead),
      ahead_stream_.get()));
  return rows_here_[l].Record(ahead_stream_);
}

// Rows that lie together: k, v [kv_heads, rows, head_dim].
absl::Status CudaHostZone::AttendTogether(const uint16_t* q, const uint16_t* k, const uint16_t* v,
                                          int64_t rows, float* out, float* lse,
                                          const cuda::Stream& stream) const {
  kernels::WindowAttentionCudaParams params;
  params.q = q;
  params.k = k;
  params.v = v;
  params.kv_heads = shape_.kv_heads;
  params.group = shape_.group();
  params.head_dim = shape_.head_dim;
  params.row_stride = params.rows = rows;
  params.scale = scale_;
  params.out = out;
  params.lse = lse;
  params.splits = std::min(splits_, kernels::DecodeSplits(rows, shape_.kv_heads));
  params.workspace = attention_workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(params, stream.get()));
  return absl::OkStatus();
}

absl::Status CudaHostZone::AttendGathered(Layer layer, const CudaSelection& selection,
                                          const uint16_t* q, float* out, float* lse,
                                          const cuda::Stream& stream) const {
  // Methods that read no keys choose as many rows in every head.
  CARREL_CHECK(selection.row_count == nullptr);
  const int64_t elements = GatheredElements(shape_, selection.rows);
  CARREL_CHECK(2 * elements <= gathered_.size());
  kernels::GatherPackedRowsParams gather;
  gather.packed = rows_.packed(layer);
  gather.ids = selection.ids;
  gather.kv_heads = shape_.kv_heads;
  gather.head_dim = shape_.head_dim;
  gather.row_stride = plan_.rows;
  gather.ids_stride = selection.stride;
  gather.count = selection.rows;
  gather.k = gathered_.data();
  gather.v = gathered_.data() + elements;
  RETURN_IF_CUDA_ERROR(kernels::GatherPackedRowsCuda(gather, stream.get()));
  return AttendTogether(q, gather.k, gather.v, selection.rows, out, lse, stream);
}

absl::Status CudaHostZone::Attend(Layer layer, const uint16_t* q, int64_t phase, bool after_fetch,
                                  float* out, float* lse, const cuda::Stream& stream) const {
  const size_t l = Index(layer);
  const bool held = plan_.slots[l] > 0;
  if (!plan_.chooses(l)) {
    return AttendTogether(q, held ? held_k(layer) : rows_.k(layer),
                          held ? held_v(layer) : rows_.v(layer), plan_.rows, out, lse, stream);
  }
  RETURN_IF_ERROR(selector_->Select(layer, q, phase, stream));
  if (after_fetch) RETURN_IF_ERROR(stream.WaitFor(rows_here_[l]));
  const CudaSelection selection = selector_->selection(layer);
  if (!held && rows_.is_packed(layer)) {
    RETURN_IF_ERROR(AttendGathered(layer, selection, q, out, lse, stream));
    const uint16_t* const k = gathered_.data();
    return EstimateRest(layer, q, selection,
                        {.k = k,
                         .v = k + GatheredElements(shape_, selection.rows),
                         .row_stride = selection.rows,
                         .gathered = true},
                        out, lse, stream);
  }
  kernels::SparseAttentionCudaParams params;
  params.q = q;
  params.k = held ? held_k(layer) : rows_.k(layer);
  params.v = held ? held_v(layer) : rows_.v(layer);
  params.row_stride = held ? plan_.slots[l] : plan_.rows;
  params.ids = selection.ids;
  params.ids_stride = selection.stride;
  if (plan_.has_bank(l)) {
    RETURN_IF_CUDA_ERROR(
        kernels::UseRowBank(UseOf(layer, selection,
                                  after_fetch ? kernels::RowBankPurpose::kNowAfterAhead
                                              : kernels::RowBankPurpose::kNow),
                            stream.get()));
    params.ids = slots_.data();
    params.ids_stride = selection.rows;
  }
  params.kv_heads = shape_.kv_heads;
  params.group = shape_.group();
  params.head_dim = shape_.head_dim;
  params.rows = selection.rows;
  params.row_count = selection.row_count;
  params.scale = scale_;
  params.out = out;
  params.lse = lse;
  params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, shape_.kv_heads));
  params.workspace = attention_workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(params, stream.get()));
  return EstimateRest(layer, q, selection,
                      {.k = params.k,
                       .v = params.v,
                       .row_stride = params.row_stride,
                       .places = params.ids,
                       .places_stride = params.ids_stride},
                      out, lse, stream);
}

absl::Status CudaHostZone::EstimateRest(Layer layer, const uint16_t* q,
                                        const CudaSelection& selection,
                                        const CudaSummaries::SelectedRows& rows, float* out,
                                        float* lse, const cuda::Stream& stream) const {
  if (summaries_.empty()) return absl::OkStatus();
  return summaries_.Attend(layer, q, selection, rows, out, lse, stream);
}

void CudaHostZone::AddTo(std::vector<LayerStatistics>& layers) const {
  for (size_t l = 0; l < layers.size() && l < plan_.slots.size(); ++l) {
    const kernels::RowBankCounters& counted = host_counters_.data()[l];
    LayerStatistics& layer = layers[l];
    BankStatistics& bank = layer.bank;
    bank.slots = plan_.slots[l];
    bank.wanted = static_cast<int64_t>(counted.wanted);
    bank.hits = static_cast<int64_t>(counted.hits);
    bank.ahead = static_cast<int64_t>(counted.ahead);
    bank.ahead_hits = static_cast<int64_t>(counted.ahead_hits);
    bank.expected = static_cast<int64_t>(counted.expected);
    bank.foreseen = static_cast<int64_t>(counted.foreseen);
    int64_t crossed = bank.wanted - bank.hits + bank.ahead - bank.ahead_hits;
    if (plan_.slots[l] == 0) crossed = layer.rows_attended;
    layer.bytes_read += crossed * rows_.row_bytes(Layer(static_cast<int32_t>(l)));
    layer.prefetched += bank.expected / std::max<int64_t>(1, shape_.kv_heads * plan_.attended[l]);
  }
}

}  // namespace carrel::decoder
