#include "decoder/zone/cuda_row_banks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/method_type.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<CudaRowBanks>> CudaRowBanks::Create(const HostZoneOptions& options,
                                                                   const OpenedContext& context) {
  ASSIGN_OR_RETURN(BankPlan plan, PlanBanks(context.selections, context.config.prefetch,
                                            options.bank, context.shape, context.zone.rows()));
  return std::unique_ptr<CudaRowBanks>(new CudaRowBanks(options, context, std::move(plan)));
}

CudaRowBanks::CudaRowBanks(const HostZoneOptions& options, const OpenedContext& context,
                           BankPlan plan)
    : map_(options.bank.map), heads_(context.shape), plan_(std::move(plan)) {
  int64_t held = 0, state = 0;
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    const size_t l = Index(layer);
    packed_.push_back(plan_.chooses(l) && !plan_.holds_all(l) &&
                      !MethodOf(options.selector).reads_keys(options.selector));
    const kernels::RowBankShape bank = BankOf(layer);
    held_at_.push_back(held);
    state_at_.push_back(state);
    held += kernels::RowBankRowBytes(bank) / 2;
    if (plan_.has_bank(l)) state += kernels::RowBankLayout(bank).bytes;
  }
  held_at_.push_back(held);
  state_at_.push_back(state);
}

std::vector<int64_t> CudaRowBanks::budgets() const {
  std::vector<int64_t> budgets = plan_.attended;
  for (size_t l = 0; l < budgets.size(); ++l) {
    if (!plan_.chooses(l) || budgets[l] == 0) budgets[l] = kAllRows;
  }
  return budgets;
}

std::vector<int64_t> CudaRowBanks::budgets_ahead() const {
  std::vector<int64_t> budgets = plan_.ahead;
  std::replace(budgets.begin(), budgets.end(), int64_t{0}, kAllRows);
  return budgets;
}

int64_t CudaRowBanks::most_gathered() const {
  int64_t most = 0;
  for (size_t l = 0; l < packed_.size(); ++l) {
    if (packed_[l] && !plan_.has_bank(l)) most = std::max(most, plan_.attended[l]);
  }
  return most;
}

void CudaRowBanks::Lay(cuda::DeviceArena& arena) {
  const int64_t chosen = plan_.most_chosen(), ahead = plan_.most_ahead();
  const auto workspace = [&](int64_t most) {
    return arena.Take<uint8_t>(
        most == 0 ? 0
                  : static_cast<int64_t>(kernels::RowBankWorkspaceBytes(heads_.kv_heads, most)));
  };
  held_ = arena.Take<uint16_t>(held_at_.back());
  state_ = arena.Take<uint8_t>(state_at_.back());
  gathered_ = arena.Take<uint16_t>(2 * elements(most_gathered()));
  now_.slots = arena.Take<int32_t>(heads_.kv_heads * chosen);
  ahead_.slots = arena.Take<int32_t>(heads_.kv_heads * ahead);
  now_.workspace = workspace(chosen);
  ahead_.workspace = workspace(ahead);
  counters_ = arena.Take<kernels::RowBankCounters>(heads_.layers);
}

absl::Status CudaRowBanks::MakeAhead(const CudaRowSelector& selector) {
  const std::vector<int64_t> ahead = budgets_ahead();
  ASSIGN_OR_RETURN(ahead_selector_, selector.Another(&ahead));
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

absl::Status CudaRowBanks::Fill(const CudaZoneRows& rows, const CudaRowSelector* selector,
                                const cuda::Stream& stream) {
  rows_ = &rows;
  ASSIGN_OR_RETURN(host_counters_,
                   cuda::PinnedBuffer<kernels::RowBankCounters>::Create(heads_.layers));
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    const size_t l = Index(layer);
    // Blocks and chunks may round a budget.
    if (plan_.has_bank(l) && selector->selection(layer).rows > plan_.attended[l]) {
      return absl::InvalidArgumentError(
          absl::StrCat("bank: layer ", layer.value(), " attends to up to ",
                       selector->selection(layer).rows, " rows for a budget of ", plan_.attended[l],
                       ": give a top_k that blocks and chunks divide"));
    }
    if (!plan_.holds_all(l)) continue;
    const int64_t bytes = heads_.kv_heads * plan_.rows * rows.row_bytes(layer);  // K, then V
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(Held(layer).k, rows.kv(layer).k,
                                         static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                         stream.get()));
  }
  if (fetches_ahead()) RETURN_IF_ERROR(MakeAhead(*selector));
  return Reset(stream);
}

absl::Status CudaRowBanks::Reset(const cuda::Stream& stream) {
  for (Layer layer(0); layer.value() < heads_.layers; layer = layer.next()) {
    if (!plan_.has_bank(Index(layer))) continue;
    RETURN_IF_CUDA_ERROR(
        kernels::RowBankReset(BankOf(layer), state_ + state_at_[Index(layer)], stream.get()));
  }
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(counters_, 0, static_cast<size_t>(host_counters_.bytes()), stream.get()));
  RETURN_IF_ERROR(CopyCounters(stream));
  return stream.Synchronize();
}

absl::Status CudaRowBanks::CopyCounters(const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_counters_.data(), counters_,
                                       static_cast<size_t>(host_counters_.bytes()),
                                       cudaMemcpyDeviceToHost, stream.get()));
  return absl::OkStatus();
}

kernels::KvRows CudaRowBanks::Held(Layer layer) const {
  kernels::Bf16* const k = held_ + held_at_[Index(layer)];
  return {k, k + kernels::RowBankRowBytes(BankOf(layer)) / 4, plan_.slots[Index(layer)]};
}

kernels::RowBankShape CudaRowBanks::BankOf(Layer layer) const {
  auto bank = kernels::OfHeads<kernels::RowBankShape>(heads_);
  bank.slots = plan_.slots[Index(layer)];
  bank.rows = plan_.rows;
  bank.map = map_;
  return bank;
}

kernels::RowBankParams CudaRowBanks::UseOf(Layer layer, const CudaSelection& selection,
                                           kernels::RowBankPurpose purpose) const {
  const Use& of = purpose == kernels::RowBankPurpose::kAhead ? ahead_ : now_;
  kernels::RowBankParams use;
  use.shape = BankOf(layer);
  if (rows_->is_packed(layer)) {
    use.packed = rows_->packed(layer);
  } else {
    use.kv = rows_->kv(layer);
  }
  use.bank = Held(layer);
  use.state = state_ + state_at_[Index(layer)];
  use.ids = selection.ids;
  use.ids_stride = selection.stride;
  use.count = selection.rows;
  use.row_count = selection.row_count;
  use.slots = of.slots;
  use.purpose = purpose;
  use.counters = counters_ + layer.value();
  use.workspace = of.workspace;
  return use;
}

absl::Status CudaRowBanks::Predict(Layer layer, const CudaQueries& queries,
                                   const cuda::Stream& stream) const {
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

kernels::GatherPackedRowsParams CudaRowBanks::GatherOf(Layer layer,
                                                       const CudaSelection& selection) const {
  // Methods that read no keys choose as many rows in every head.
  CARREL_CHECK(selection.row_count == nullptr && selection.rows <= most_gathered());
  auto gather = kernels::OfHeads<kernels::GatherPackedRowsParams>(heads_);
  gather.packed = rows_->packed(layer);
  gather.ids = selection.ids;
  gather.ids_stride = selection.stride;
  gather.count = selection.rows;
  gather.to = {gathered_, gathered_ + elements(selection.rows), selection.rows};
  return gather;
}

CudaSummaries::SelectedRows CudaRowBanks::Bring(Layer layer, const CudaSelection& selection,
                                                bool fetched, CudaZoneWork& work) const {
  const size_t l = Index(layer);
  if (fetched) work.fetched.push_back(&rows_ready_[l]);
  if (plan_.has_bank(l)) {
    work.banks.push_back(
        UseOf(layer, selection,
              fetched ? kernels::RowBankPurpose::kNowAfterAhead : kernels::RowBankPurpose::kNow));
    return {.kv = AllRows(layer), .places = now_.slots, .places_stride = selection.rows};
  }
  if (!rows_->is_packed(layer)) return {AllRows(layer)};
  work.gathers.push_back(GatherOf(layer, selection));
  return {.kv = work.gathers.back().to, .gathered = true};
}

void CudaRowBanks::Count(std::vector<LayerStatistics>& layers) const {
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
    layer.bytes_read += crossed * rows_->row_bytes(Layer(static_cast<int32_t>(l)));
    layer.prefetched += bank.expected / std::max<int64_t>(1, heads_.kv_heads * plan_.attended[l]);
  }
}

}  // namespace carrel::decoder
