#include "decoder/zone/cuda_host_zone.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/host_rows.h"
#include "decoder/zone/cuda_zone_work.h"

namespace carrel::decoder {
namespace {

// Layers whose rows are read by attention alone, a few at a time.
std::vector<bool> PackedLayers(const BankPlan& plan, const SelectorConfig& selector) {
  std::vector<bool> packed;
  for (size_t l = 0; l < plan.attended.size(); ++l) {
    packed.push_back(plan.chooses(l) && !plan.holds_all(l) && !SelectorReadsKeys(selector));
  }
  return packed;
}

std::string MaskOf(const std::vector<bool>& layers) {
  std::string mask;
  for (const bool layer : layers) mask += layer ? '1' : '0';
  return mask;
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

absl::StatusOr<std::unique_ptr<CudaHostZone>> CudaHostZone::Create(const HostZoneOptions& options,
                                                                   const OpenedContext& context) {
  ASSIGN_OR_RETURN(BankPlan plan, PlanBanks(context.selections, context.config.prefetch,
                                            options.bank, context.shape, context.zone.rows()));
  return std::unique_ptr<CudaHostZone>(new CudaHostZone(options, context, std::move(plan)));
}

CudaZoneShape CudaHostZone::ShapeOf(bool ahead) const {
  CudaZoneShape shape{shape_, context_.zone, {}};
  for (size_t l = 0; l < plan_.attended.size(); ++l) {
    const int64_t rows = ahead ? plan_.ahead[l] : plan_.chooses(l) ? plan_.attended[l] : 0;
    shape.budgets.push_back(rows == 0 ? kAllRows : rows);
  }
  if (!ahead) shape.head_budgets = HeadBudgets(context_.selections, shape_.kv_heads);
  return shape;
}

CudaHostZone::CudaHostZone(const HostZoneOptions& options, const OpenedContext& context,
                           BankPlan plan)
    : context_(context),
      map_(options.bank.map),
      shape_(context.shape),
      method_(options.selector),
      plan_(std::move(plan)),
      predicts_(context.config.prefetch != Prefetch::kOff),
      scale_(1.0f / std::sqrt(static_cast<float>(shape_.head_dim))),
      splits_(kernels::DecodeSplits(plan_.rows, shape_.kv_heads)),
      key_(SharedZoneKey(context, "host " + MaskOf(PackedLayers(plan_, method_)), method_,
                         ShapeOf(/*ahead=*/false))) {
  int64_t held = 0, state = 0;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    const kernels::RowBankShape bank = BankOf(layer);
    held_at_.push_back(held);
    state_at_.push_back(state);
    held += kernels::RowBankRowBytes(bank) / 2;
    if (plan_.has_bank(Index(layer))) state += kernels::RowBankLayout(bank).bytes;
  }
  held_at_.push_back(held);
  state_at_.push_back(state);
}

CudaHostZone::Memory CudaHostZone::Lay(cuda::DeviceArena& arena) const {
  const auto workspace = [&](int64_t most) {
    return arena.Take<uint8_t>(
        most == 0 ? 0
                  : static_cast<int64_t>(kernels::RowBankWorkspaceBytes(shape_.kv_heads, most)));
  };
  const int64_t chosen = plan_.most_chosen(), ahead = plan_.most_ahead();
  Memory memory;
  memory.held = arena.Take<uint16_t>(held_at_.back());
  memory.state = arena.Take<uint8_t>(state_at_.back());
  memory.gathered =
      arena.Take<uint16_t>(2 * GatheredElements(shape_, MostGathered(plan_, method_)));
  memory.slots = arena.Take<int32_t>(shape_.kv_heads * chosen);
  memory.ahead_slots = arena.Take<int32_t>(shape_.kv_heads * ahead);
  memory.attention_workspace = arena.Take<uint8_t>(AttentionWorkspaceBytes(shape_, plan_.rows));
  memory.bank_workspace = workspace(chosen);
  memory.ahead_workspace = workspace(ahead);
  memory.counters = arena.Take<kernels::RowBankCounters>(shape_.layers);
  if (context_.config.estimate == Estimate::kOn && chosen > 0) {
    memory.summaries = CudaSummaries(ShapeOf(/*ahead=*/false), *context_.rows, arena);
  }
  return memory;
}

kernels::PackedHead* CudaHostZone::LayHeads(cuda::DeviceArena& arena) const {
  return arena.Take<kernels::PackedHead>(int64_t{shape_.layers} * shape_.kv_heads);
}

const HostRows* CudaHostZone::RowsForSelector() const {
  return SelectorNeedsHostRows(method_) ? context_.rows.get() : nullptr;
}

absl::StatusOr<int64_t> CudaHostZone::Bytes() const {
  int64_t bytes = cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) {
    LayHeads(arena);
    Lay(arena);
  });
  if (plan_.most_chosen() > 0) {
    const CudaZoneShape shape = ShapeOf(/*ahead=*/false);
    ASSIGN_OR_RETURN(const int64_t method, CudaRowSelectorBytes(method_, shape, RowsForSelector()));
    bytes += method;
    if (shares_selector()) {
      ASSIGN_OR_RETURN(const int64_t own, CudaAnotherBytes(method_, shape, RowsForSelector()));
      bytes += own;
    }
  }
  if (plan_.most_ahead() > 0) {
    ASSIGN_OR_RETURN(const int64_t fork,
                     CudaForkBytes(method_, ShapeOf(/*ahead=*/true), RowsForSelector()));
    bytes += fork;
  }
  return bytes;
}

absl::StatusOr<int64_t> CudaHostZone::ShareableBytes() const {
  if (key_.empty()) return 0;
  const int64_t heads =
      cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { LayHeads(arena); });
  if (!shares_selector()) return heads;
  ASSIGN_OR_RETURN(const int64_t selector,
                   CudaRowSelectorBytes(method_, ShapeOf(/*ahead=*/false), RowsForSelector()));
  return heads + selector;
}

CudaShared<CudaHostZone::Parts>::Made CudaHostZone::MakeParts(const cuda::Stream& stream) const {
  auto parts = std::make_shared<Parts>();
  ASSIGN_OR_RETURN(const int64_t bytes, ShareableBytes());
  parts->reserved = model::GpuReservation(bytes);
  kernels::PackedHead* heads = nullptr;
  ASSIGN_OR_RETURN(parts->arena, cuda::DeviceArena::Of(
                                     [&](cuda::DeviceArena& arena) { heads = LayHeads(arena); }));
  ASSIGN_OR_RETURN(parts->rows,
                   CudaZoneRows::Create(shape_, context_.zone, PackedLayers(plan_, method_),
                                        context_.max_fetch_rows, context_.client,
                                        context_.rows.get(), context_.pool, heads));
  if (shares_selector()) {
    ASSIGN_OR_RETURN(parts->selector, MakeSelector(parts->rows, stream));
  }
  return parts;
}

absl::Status CudaHostZone::Load(int64_t, const cuda::Stream& stream) {
  RETURN_IF_ERROR(Allocate());
  ASSIGN_OR_RETURN(parts_, CudaShared<Parts>::Of(key_, [&] { return MakeParts(stream); }));
  RETURN_IF_ERROR(MakeSelectors(stream));
  if (!memory_.summaries.empty())
    RETURN_IF_ERROR(memory_.summaries.Load(*context_.rows, context_.pool));
  return FillDevice(stream);
}

absl::Status CudaHostZone::Allocate() {
  ASSIGN_OR_RETURN(arena_,
                   cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { memory_ = Lay(arena); }));
  ASSIGN_OR_RETURN(host_counters_,
                   cuda::PinnedBuffer<kernels::RowBankCounters>::Create(shape_.layers));
  if (plan_.most_ahead() == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(ahead_stream_, cuda::Stream::Create());
  for (int32_t layer = 0; layer < shape_.layers; ++layer) {
    for (std::vector<cuda::Event>* events : {&query_ready_, &rows_ready_}) {
      ASSIGN_OR_RETURN(cuda::Event event, cuda::Event::Create());
      events->push_back(std::move(event));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> CudaHostZone::MakeSelector(
    const CudaZoneRows& rows, const cuda::Stream& stream) const {
  CudaKeys keys;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    keys.layers.push_back(rows.is_packed(layer) ? kernels::KvView() : rows.kv(layer));
  }
  cuda::PinnedBuffer<uint16_t> unpacked;
  keys.unpack = [&](Layer layer) -> absl::StatusOr<kernels::KvView> {
    if (unpacked.size() == 0) {
      ASSIGN_OR_RETURN(unpacked, cuda::PinnedBuffer<uint16_t>::Create(shape_.kv_heads * plan_.rows *
                                                                      shape_.head_dim));
    }
    rows.UnpackKeys(layer, context_.pool, unpacked.data());
    return kernels::KvView{.k = unpacked.data(), .row_stride = plan_.rows};
  };
  return MakeCudaRowSelector(method_, ShapeOf(/*ahead=*/false), keys, RowsForSelector(),
                             context_.pool, stream);
}

absl::Status CudaHostZone::MakeSelectors(const cuda::Stream& stream) {
  if (plan_.most_chosen() == 0) return absl::OkStatus();
  if (shares_selector()) {
    ASSIGN_OR_RETURN(selector_, parts_->selector->Another());
  } else {
    ASSIGN_OR_RETURN(selector_, MakeSelector(rows(), stream));
  }
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    // Blocks and chunks may round a budget.
    if (plan_.has_bank(Index(layer)) && AttendedPerHead(layer) > plan_.attended[Index(layer)]) {
      return absl::InvalidArgumentError(
          absl::StrCat("bank: layer ", layer.value(), " attends to up to ", AttendedPerHead(layer),
                       " rows for a budget of ", plan_.attended[Index(layer)],
                       ": give a top_k that blocks and "
                       "chunks divide"));
    }
  }
  if (plan_.most_ahead() == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(ahead_selector_, selector_->Fork(ShapeOf(/*ahead=*/true).budgets));
  CARREL_CHECK(ahead_selector_ != nullptr);  // ValidateDeviceConfig
  return absl::OkStatus();
}

absl::Status CudaHostZone::FillDevice(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    if (!plan_.holds_all(Index(layer))) continue;
    const int64_t bytes = shape_.kv_heads * plan_.rows * rows().row_bytes(layer);  // K, then V
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(Held(layer).k, rows().kv(layer).k,
                                         static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                         stream.get()));
  }
  return Reset(stream);
}

int64_t CudaHostZone::AttendedPerHead(Layer layer) const {
  return plan_.chooses(Index(layer)) ? selector_->selection(layer).rows : plan_.rows;
}

int64_t CudaHostZone::attended(Layer layer) const {
  const int64_t of_all = plan_.chooses(Index(layer)) ? selector_->selection(layer).total_rows : -1;
  return of_all >= 0 ? of_all : shape_.kv_heads * AttendedPerHead(layer);
}

absl::Status CudaHostZone::Reset(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    if (!plan_.has_bank(Index(layer))) continue;
    RETURN_IF_CUDA_ERROR(kernels::RowBankReset(
        BankOf(layer), memory_.state + state_at_[Index(layer)], stream.get()));
  }
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory_.counters, 0,
                                       static_cast<size_t>(host_counters_.bytes()), stream.get()));
  RETURN_IF_ERROR(CopyCounters(stream));
  return stream.Synchronize();
}

absl::Status CudaHostZone::CopyCounters(const cuda::Stream& stream) {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_counters_.data(), memory_.counters,
                                       static_cast<size_t>(host_counters_.bytes()),
                                       cudaMemcpyDeviceToHost, stream.get()));
  return absl::OkStatus();
}

kernels::KvRows CudaHostZone::Held(Layer layer) const {
  kernels::Bf16* const k = memory_.held + held_at_[Index(layer)];
  return {k, k + kernels::RowBankRowBytes(BankOf(layer)) / 4, plan_.slots[Index(layer)]};
}

kernels::KvRows CudaHostZone::Gathered(int64_t rows) const {
  const int64_t elements = GatheredElements(shape_, rows);
  CARREL_CHECK(elements <= GatheredElements(shape_, MostGathered(plan_, method_)));
  return {memory_.gathered, memory_.gathered + elements, rows};
}

kernels::RowBankShape CudaHostZone::BankOf(Layer layer) const {
  kernels::RowBankShape bank;
  bank.kv_heads = shape_.kv_heads;
  bank.head_dim = shape_.head_dim;
  bank.slots = plan_.slots[Index(layer)];
  bank.rows = plan_.rows;
  bank.map = map_;
  return bank;
}

kernels::RowBankParams CudaHostZone::UseOf(Layer layer, const CudaSelection& selection,
                                           kernels::RowBankPurpose purpose) const {
  const bool ahead = purpose == kernels::RowBankPurpose::kAhead;
  kernels::RowBankParams use;
  use.shape = BankOf(layer);
  if (rows().is_packed(layer)) {
    use.packed = rows().packed(layer);
  } else {
    use.kv = rows().kv(layer);
  }
  use.bank = Held(layer);
  use.state = memory_.state + state_at_[Index(layer)];
  use.ids = selection.ids;
  use.ids_stride = selection.stride;
  use.count = selection.rows;
  use.row_count = selection.row_count;
  use.slots = ahead ? memory_.ahead_slots : memory_.slots;
  use.purpose = purpose;
  use.counters = memory_.counters + layer.value();
  use.workspace = ahead ? memory_.ahead_workspace : memory_.bank_workspace;
  return use;
}

absl::Status CudaHostZone::Predict(Layer layer, const CudaQueries& queries,
                                   const cuda::Stream& stream) {
  const size_t l = Index(layer);
  RETURN_IF_ERROR(query_ready_[l].Record(stream));
  RETURN_IF_ERROR(ahead_stream_.WaitFor(query_ready_[l]));
  RETURN_IF_ERROR(ahead_selector_->Select(layer, queries.rounded, 0, ahead_stream_));
  RETURN_IF_CUDA_ERROR(kernels::UseRowBank(
      UseOf(layer, ahead_selector_->selection(layer), kernels::RowBankPurpose::kAhead),
      ahead_stream_.get()));
  return rows_ready_[l].Record(ahead_stream_);
}

kernels::WindowAttentionCudaParams CudaHostZone::ToAll(const uint16_t* q, const kernels::KvView& kv,
                                                       const CudaPartial& to) const {
  kernels::WindowAttentionCudaParams params;
  params.q = q;
  params.kv = kv;
  params.kv_heads = shape_.kv_heads;
  params.group = shape_.group();
  params.head_dim = shape_.head_dim;
  params.rows = kv.row_stride;
  params.scale = scale_;
  params.out = to.out;
  params.lse = to.lse;
  params.splits = std::min(splits_, kernels::DecodeSplits(params.rows, shape_.kv_heads));
  params.workspace = memory_.attention_workspace;
  return params;
}

kernels::SparseAttentionCudaParams CudaHostZone::ToChosen(Layer layer,
                                                          const CudaSelection& selection,
                                                          const uint16_t* q,
                                                          const CudaPartial& to) const {
  kernels::SparseAttentionCudaParams params;
  params.q = q;
  params.kv = RowsOf(layer);
  params.ids = selection.ids;
  params.ids_stride = selection.stride;
  if (plan_.has_bank(Index(layer))) {
    params.ids = memory_.slots;
    params.ids_stride = selection.rows;
  }
  params.kv_heads = shape_.kv_heads;
  params.group = shape_.group();
  params.head_dim = shape_.head_dim;
  params.rows = selection.rows;
  params.row_count = selection.row_count;
  params.scale = scale_;
  params.out = to.out;
  params.lse = to.lse;
  params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, shape_.kv_heads));
  params.workspace = memory_.attention_workspace;
  return params;
}

kernels::GatherPackedRowsParams CudaHostZone::GatherOf(Layer layer,
                                                       const CudaSelection& selection) const {
  // Methods that read no keys choose as many rows in every head.
  CARREL_CHECK(selection.row_count == nullptr);
  kernels::GatherPackedRowsParams gather;
  gather.packed = rows().packed(layer);
  gather.ids = selection.ids;
  gather.kv_heads = shape_.kv_heads;
  gather.head_dim = shape_.head_dim;
  gather.ids_stride = selection.stride;
  gather.count = selection.rows;
  gather.to = Gathered(selection.rows);
  return gather;
}

absl::Status CudaHostZone::Attend(Layer layer, const CudaQueries& queries, int64_t phase,
                                  const CudaPartial& to, const cuda::Stream& stream) {
  const bool after_fetch = predicts(layer, queries.n);
  const int64_t heads = shape_.q_heads, width = heads * shape_.head_dim;
  for (int64_t i = 0; i < queries.n; ++i) {
    RETURN_IF_ERROR(AttendToken(layer, queries.rounded + i * width, phase, after_fetch,
                                {to.out + i * width, to.lse + i * heads}, stream));
  }
  return absl::OkStatus();
}

bool CudaHostZone::AddWork(Layer layer, const uint16_t* q, const CudaPartial& to,
                           CudaZoneWork& work) const {
  const size_t l = Index(layer);
  if (!plan_.chooses(l)) {
    work.to_all.push_back(ToAll(q, RowsOf(layer), to));
    return true;
  }
  if (fetches_ahead(layer) || !memory_.summaries.empty()) return false;
  if (!selector_->AddChoice(layer, q, nullptr, work.choices)) return false;
  const CudaSelection selection = selector_->selection(layer);
  if (gathers(layer)) {
    work.gathers.push_back(GatherOf(layer, selection));
    work.to_all.push_back(ToAll(q, work.gathers.back().to, to));
    return true;
  }
  if (plan_.has_bank(l)) {
    work.banks.push_back(UseOf(layer, selection, kernels::RowBankPurpose::kNow));
  }
  work.to_chosen.push_back(ToChosen(layer, selection, q, to));
  return true;
}

absl::Status CudaHostZone::AttendToken(Layer layer, const uint16_t* q, int64_t phase,
                                       bool after_fetch, const CudaPartial& to,
                                       const cuda::Stream& stream) const {
  const size_t l = Index(layer);
  if (!plan_.chooses(l)) {
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(ToAll(q, RowsOf(layer), to), stream.get()));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(selector_->Select(layer, q, phase, stream));
  if (after_fetch) RETURN_IF_ERROR(stream.WaitFor(rows_ready_[l]));
  const CudaSelection selection = selector_->selection(layer);
  if (gathers(layer)) {
    const kernels::GatherPackedRowsParams gather = GatherOf(layer, selection);
    RETURN_IF_CUDA_ERROR(kernels::GatherPackedRowsCuda(gather, stream.get()));
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(ToAll(q, gather.to, to), stream.get()));
    return EstimateRest(layer, q, selection, {.kv = gather.to, .gathered = true}, to.out, to.lse,
                        stream);
  }
  if (plan_.has_bank(l)) {
    RETURN_IF_CUDA_ERROR(
        kernels::UseRowBank(UseOf(layer, selection,
                                  after_fetch ? kernels::RowBankPurpose::kNowAfterAhead
                                              : kernels::RowBankPurpose::kNow),
                            stream.get()));
  }
  const kernels::SparseAttentionCudaParams params = ToChosen(layer, selection, q, to);
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(params, stream.get()));
  return EstimateRest(layer, q, selection,
                      {.kv = params.kv, .places = params.ids, .places_stride = params.ids_stride},
                      to.out, to.lse, stream);
}

absl::Status CudaHostZone::EstimateRest(Layer layer, const uint16_t* q,
                                        const CudaSelection& selection,
                                        const CudaSummaries::SelectedRows& rows, float* out,
                                        float* lse, const cuda::Stream& stream) const {
  if (memory_.summaries.empty()) return absl::OkStatus();
  return memory_.summaries.Attend(layer, q, selection, rows, out, lse, stream);
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
    layer.bytes_read += crossed * rows().row_bytes(Layer(static_cast<int32_t>(l)));
    layer.prefetched += bank.expected / std::max<int64_t>(1, shape_.kv_heads * plan_.attended[l]);
  }
}

}  // namespace carrel::decoder
