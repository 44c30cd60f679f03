#include "decoder/zone/cuda_host_zone.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/host_rows.h"
#include "decoder/zone/cuda_zone_work.h"
#include "kernels/of_heads.h"

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

// What is chosen of each layer; kAllRows where there are none.
std::vector<int64_t> BudgetsOf(const std::vector<int64_t>& rows) {
  std::vector<int64_t> budgets = rows;
  std::replace(budgets.begin(), budgets.end(), int64_t{0}, kAllRows);
  return budgets;
}

CudaZoneShape ShapeOf(const OpenedContext& context, const BankPlan& plan) {
  std::vector<int64_t> chosen = plan.attended;
  for (size_t l = 0; l < chosen.size(); ++l) chosen[l] *= plan.chooses(l);
  return {context.shape, context.zone, BudgetsOf(chosen),
          HeadBudgets(context.selections, context.shape.kv_heads)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaHostZone>> CudaHostZone::Create(const HostZoneOptions& options,
                                                                   const OpenedContext& context) {
  ASSIGN_OR_RETURN(BankPlan plan, PlanBanks(context.selections, context.config.prefetch,
                                            options.bank, context.shape, context.zone.rows()));
  return std::unique_ptr<CudaHostZone>(new CudaHostZone(options, context, std::move(plan)));
}

CudaHostZone::CudaHostZone(const HostZoneOptions& options, const OpenedContext& context,
                           BankPlan plan)
    : CudaHeldZone(context, ShapeOf(context, plan),
                   "host " + MaskOf(PackedLayers(plan, options.selector))),
      map_(options.bank.map),
      heads_(context.shape),
      plan_(std::move(plan)),
      predicts_(context.config.prefetch != Prefetch::kOff) {
  int64_t held = 0, state = 0;
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    const kernels::RowBankShape bank = BankOf(layer);
    held_at_.push_back(held);
    state_at_.push_back(state);
    held += kernels::RowBankRowBytes(bank) / 2;
    if (plan_.has_bank(Index(layer))) state += kernels::RowBankLayout(bank).bytes;
  }
  held_at_.push_back(held);
  state_at_.push_back(state);
}

void CudaHostZone::LayPlace(cuda::DeviceArena& arena) {
  const auto workspace = [&](int64_t most) {
    return arena.Take<uint8_t>(
        most == 0 ? 0
                  : static_cast<int64_t>(kernels::RowBankWorkspaceBytes(heads_.kv_heads, most)));
  };
  const int64_t chosen = plan_.most_chosen(), ahead = plan_.most_ahead();
  memory_.held = arena.Take<uint16_t>(held_at_.back());
  memory_.state = arena.Take<uint8_t>(state_at_.back());
  memory_.gathered =
      arena.Take<uint16_t>(2 * GatheredElements(heads_, MostGathered(plan_, method())));
  memory_.slots = arena.Take<int32_t>(heads_.kv_heads * chosen);
  memory_.ahead_slots = arena.Take<int32_t>(heads_.kv_heads * ahead);
  memory_.bank_workspace = workspace(chosen);
  memory_.ahead_workspace = workspace(ahead);
  memory_.counters = arena.Take<kernels::RowBankCounters>(heads_.layers);
}

absl::StatusOr<int64_t> CudaHostZone::BytesBeside() const {
  if (plan_.most_ahead() == 0) return 0;
  const std::vector<int64_t> ahead = BudgetsOf(plan_.ahead);
  return CudaAnotherBytes(method(), shape(), RowsForSelector(), &ahead);
}

Shared<const CudaHostZone::Rows>::Made CudaHostZone::ReadRows() const {
  auto made = std::make_shared<Rows>();
  made->reserved = ReservedIfShared(RowBytes());
  ASSIGN_OR_RETURN(made->rows, CudaZoneRows::Create(context_, PackedLayers(plan_, method())));
  return made;
}

absl::Status CudaHostZone::HoldRows() {
  ASSIGN_OR_RETURN(rows_, Shared<const Rows>::Of(key(), [&] { return ReadRows(); }));
  return absl::OkStatus();
}

CudaKeys CudaHostZone::Keys(cuda::PinnedBuffer<uint16_t>& room) const {
  CudaKeys keys;
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    keys.layers.push_back(rows().is_packed(layer) ? kernels::KvView() : rows().kv(layer));
  }
  keys.unpack = [this, &room](Layer layer) -> absl::StatusOr<kernels::KvView> {
    if (room.size() == 0) {
      ASSIGN_OR_RETURN(room, cuda::PinnedBuffer<uint16_t>::Create(heads_.kv_heads * plan_.rows *
                                                                  heads_.head_dim));
    }
    rows().UnpackKeys(layer, context_.pool, room.data());
    return kernels::KvView{.k = room.data(), .row_stride = plan_.rows};
  };
  return keys;
}

absl::Status CudaHostZone::MakeAhead() {
  if (plan_.most_ahead() == 0) return absl::OkStatus();
  const std::vector<int64_t> ahead = BudgetsOf(plan_.ahead);
  ASSIGN_OR_RETURN(ahead_selector_, selector()->Another(&ahead));
  CARREL_CHECK(ahead_selector_ != nullptr);  // ValidateDeviceConfig
  ASSIGN_OR_RETURN(ahead_stream_, cuda::Stream::Create());
  for (int32_t layer = 0; layer < heads_.layers; ++layer) {
    for (std::vector<cuda::Event>* events : {&query_ready_, &rows_ready_}) {
      ASSIGN_OR_RETURN(cuda::Event event, cuda::Event::Create());
      events->push_back(std::move(event));
    }
  }
  return absl::OkStatus();
}

absl::Status CudaHostZone::Fill(const cuda::Stream& stream) {
  ASSIGN_OR_RETURN(host_counters_,
                   cuda::PinnedBuffer<kernels::RowBankCounters>::Create(heads_.layers));
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    // Blocks and chunks may round a budget.
    if (plan_.has_bank(Index(layer)) && AttendedPerHead(layer) > plan_.attended[Index(layer)]) {
      return absl::InvalidArgumentError(
          absl::StrCat("bank: layer ", layer.value(), " attends to up to ", AttendedPerHead(layer),
                       " rows for a budget of ", plan_.attended[Index(layer)],
                       ": give a top_k that blocks and chunks divide"));
    }
    if (!plan_.holds_all(Index(layer))) continue;
    const int64_t bytes = heads_.kv_heads * plan_.rows * rows().row_bytes(layer);  // K, then V
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(Held(layer).k, rows().kv(layer).k,
                                         static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                         stream.get()));
  }
  RETURN_IF_ERROR(MakeAhead());
  return Reset(stream);
}

absl::Status CudaHostZone::Reset(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
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

kernels::RowBankShape CudaHostZone::BankOf(Layer layer) const {
  auto bank = kernels::OfHeads<kernels::RowBankShape>(heads_);
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
  CudaZoneWork work;
  ahead_selector_->Add({layer, queries.rounded}, work.choices);
  work.banks.push_back(
      UseOf(layer, ahead_selector_->selection(layer), kernels::RowBankPurpose::kAhead));
  RETURN_IF_ERROR(work.Launch(ahead_stream_));
  return rows_ready_[l].Record(ahead_stream_);
}

kernels::GatherPackedRowsParams CudaHostZone::GatherOf(Layer layer,
                                                       const CudaSelection& selection) const {
  // Methods that read no keys choose as many rows in every head.
  CARREL_CHECK(selection.row_count == nullptr);
  auto gather = kernels::OfHeads<kernels::GatherPackedRowsParams>(heads_);
  gather.packed = rows().packed(layer);
  gather.ids = selection.ids;
  gather.ids_stride = selection.stride;
  gather.count = selection.rows;
  const int64_t elements = GatheredElements(heads_, selection.rows);
  CARREL_CHECK(elements <= GatheredElements(heads_, MostGathered(plan_, method())));
  gather.to = {memory_.gathered, memory_.gathered + elements, selection.rows};
  return gather;
}

CudaHostZone::Places CudaHostZone::Bring(Layer layer, const CudaSelection& selection, bool fetched,
                                         CudaZoneWork& work) const {
  const size_t l = Index(layer);
  if (fetched) work.fetched.push_back(&rows_ready_[l]);
  if (!plan_.has_bank(l)) {
    if (!rows().is_packed(layer)) return {AllRows(layer)};
    work.gathers.push_back(GatherOf(layer, selection));
    return {.kv = work.gathers.back().to, .gathered = true};
  }
  work.banks.push_back(
      UseOf(layer, selection,
            fetched ? kernels::RowBankPurpose::kNowAfterAhead : kernels::RowBankPurpose::kNow));
  return {.kv = AllRows(layer), .places = memory_.slots, .places_stride = selection.rows};
}

std::vector<LayerStatistics> CudaHostZone::statistics() const {
  std::vector<LayerStatistics> layers = statistics_;
  for (size_t l = 0; l < layers.size(); ++l) {
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
    layer.prefetched += bank.expected / std::max<int64_t>(1, heads_.kv_heads * plan_.attended[l]);
  }
  return layers;
}

}  // namespace carrel::decoder
