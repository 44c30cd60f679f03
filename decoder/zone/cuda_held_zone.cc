// What:      a zone whose rows this process holds: a method that chooses among them on the GPU, and the
//            attention to what it chose. The rows lie on the device; or in pinned memory of this host, and
//            cuda_row_banks.h brings the chosen ones to where attention reads them: then keys that a method reads to
//            choose cross the bus, too, and where it reads none, a layer's rows are packed.
// Math:      dense layers attend to every row, the others to those that the method chooses within the
//            layer's budget (decoder/select/cuda_row_selector.h), and with estimate=on to summaries of the
//            rest. On the device a block of a prompt may attend to every row in one pass (PromptTakesAll).
//            Where rows lie changes no bit.
// Shapes:    on the device of each layer k, v [kv_heads, rows, head_dim] bf16; else cuda_row_banks.h.
// Errors:    ResourceExhausted device or pinned memory; those of the store while it is filled; those of
//            MakeCudaRowSelector and PlanBanks.
// Ownership: as OpenedContext. Rows, and what method=hash keeps of them, are shared with other sequences
//            over the same content.
// Threads:   one. Add, Attend and Predict only enqueue and can be captured.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/cuda/arena.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/method_type.h"
#include "decoder/shared.h"
#include "decoder/zone/cuda_row_banks.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/make_zone.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/of_heads.h"
#include "model/device.h"

namespace carrel::decoder {
namespace {

// What parts of a zone that sequences share depend on (shared.h); empty where the content has no id.
std::string SharedZoneKey(const OpenedContext& context, const CudaRowBanks* banks,
                          const SelectorConfig& method, const CudaZoneShape& shape) {
  int device = 0;
  if (context.content_id.empty() || cudaGetDevice(&device) != cudaSuccess) return "";
  const std::string place =
      banks == nullptr ? "device" : absl::StrCat("host ", absl::StrJoin(banks->packed(), ""));
  return absl::StrCat(place, " ", device, " ", context.content_id, " ", shape.zone.begin, " ",
                      shape.zone.end, " ", DescribeSelector(method), " ",
                      absl::StrJoin(shape.budgets, ","), " ",
                      absl::StrJoin(shape.head_budgets, ","));
}

// The estimation term of a zone that a GPU attends to: summaries of every layer that is not dense, in device memory, and
// attention to them (kernels/attention/summary_attention). Its memory is that of the arena; it keeps nothing of the
// host's. DataLoss damaged summaries.   Cost: 2 head_dim + 16 bytes per cluster, and a byte per row, of each KV head.
class CudaSummaries {
 public:
  CudaSummaries() = default;
  // rows.has_summaries(); the zone is not empty.
  CudaSummaries(const CudaZoneShape& shape, const HostRows& rows, cuda::DeviceArena& arena)
      : shape_(shape), segments_(rows.SummarySegmentsOf(shape.zone)) {
    const AttentionShape& heads = shape.heads;
    const int64_t zone_rows = shape.zone.rows();
    clusters_ = ((segments_.first + zone_rows - 1) / segments_.segment_rows + 1) *
                segments_.segment_clusters;
    workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(
        kernels::SummaryWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, clusters_)));
    for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
      const int64_t kept = shape.dense(layer) ? 0 : heads.kv_heads;
      LayerTable& table = layers_.emplace_back();
      table.keys = arena.Take<int8_t>(kept * clusters_ * heads.head_dim);
      table.values = arena.Take<int8_t>(kept * clusters_ * heads.head_dim);
      table.clusters = arena.Take<kernels::SummaryTable::Cluster>(kept * clusters_);
      table.row_cluster = arena.Take<uint8_t>(kept * zone_rows);
      table.centre = arena.Take<float>(kept * heads.head_dim);
    }
  }

  // Whether there are any.
  bool empty() const { return layers_.empty(); }

  absl::Status Load(const HostRows& rows, ThreadPool* pool) const {
    const int64_t heads = shape_.heads.kv_heads;
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      const LayerTable& table = layers_[static_cast<size_t>(layer.value())];
      std::vector<absl::StatusOr<kernels::SummaryTable>> of_heads(static_cast<size_t>(heads));
      pool->ParallelFor(heads, [&](int64_t h) {
        of_heads[static_cast<size_t>(h)] =
            rows.SummaryTableOf(layer, KvHead(static_cast<int32_t>(h)), shape_.zone);
      });
      for (int64_t h = 0; h < heads; ++h) {
        RETURN_IF_ERROR(of_heads[static_cast<size_t>(h)].status());
        const kernels::SummaryTable& of_head = *of_heads[static_cast<size_t>(h)];
        CARREL_CHECK(static_cast<int64_t>(of_head.clusters.size()) == clusters_);
        const auto copy = [h](auto* to, const auto& from) {
          return CopyToDevice(to + h * static_cast<int64_t>(from.size()), from);
        };
        RETURN_IF_ERROR(copy(table.keys, of_head.keys));
        RETURN_IF_ERROR(copy(table.values, of_head.values));
        RETURN_IF_ERROR(copy(table.clusters, of_head.clusters));
        RETURN_IF_ERROR(copy(table.row_cluster, of_head.row_cluster));
        RETURN_IF_ERROR(copy(table.centre, of_head.centre));
      }
    }
    return absl::OkStatus();
  }

  // What was not selected joins `to`, the attention to what was, which lies at `places`.
  kernels::SummaryAttentionCudaParams ToRest(Layer layer, const uint16_t* q,
                                             const CudaSelection& selection,
                                             const CudaPlaces& places,
                                             const CudaPartial& to) const {
    const LayerTable& table = layers_[static_cast<size_t>(layer.value())];
    auto params = kernels::OfHeads<kernels::SummaryAttentionCudaParams>(shape_.heads);
    params.q = q;
    params.kv = places.kv;
    params.ids = selection.ids;
    params.ids_stride = selection.stride;
    params.places = places.places;
    params.places_stride = places.stride;
    params.gathered = places.gathered;
    params.selected = selection.rows;
    params.row_count = selection.row_count;
    params.base = selection.base;
    params.table = {segments_,    clusters_,      shape_.zone.rows(), table.keys,
                    table.values, table.clusters, table.row_cluster,  table.centre};
    params.out = to.out;
    params.lse = to.lse;
    params.workspace = workspace_;
    return params;
  }

 private:
  struct LayerTable {
    int8_t *keys = nullptr, *values = nullptr;
    kernels::SummaryTable::Cluster* clusters = nullptr;
    uint8_t* row_cluster = nullptr;
    float* centre = nullptr;
  };

  CudaZoneShape shape_;
  kernels::SummarySegments segments_;
  int64_t clusters_ = 0;  // of each KV head
  std::vector<LayerTable> layers_;
  uint8_t* workspace_ = nullptr;
};

class CudaHeldZone final : public CudaZoneAttention {
 public:
  // banks: of rows in pinned memory of this host; null: they lie on the device. context.rows: where NeedsHostRows, or
  // estimate=on: then it has summaries; in pinned memory they are copied, where they are given.
  CudaHeldZone(const OpenedContext& context, std::unique_ptr<CudaRowBanks> banks)
      : CudaZoneAttention(context),
        budgets_{shape_, zone_, Budgets(context.selections),
                 HeadBudgets(context.selections, shape_.kv_heads)},
        splits_(kernels::DecodeSplits(zone_.rows(), shape_.kv_heads)),
        key_(SharedZoneKey(context, banks.get(), method_, budgets_)),
        banks_(std::move(banks)) {}

  absl::StatusOr<CudaZoneBytes> Bytes() override {
    int64_t bytes =
        RowBytes() + cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
    std::vector<absl::StatusOr<int64_t>> selectors;
    if (banks_ != nullptr && banks_->fetches_ahead()) {
      const std::vector<int64_t> ahead = banks_->budgets_ahead();
      selectors.push_back(CudaAnotherBytes(method_, budgets_, RowsForSelector(), &ahead));
    }
    if (chooses()) selectors.push_back(CudaRowSelectorBytes(method_, budgets_, RowsForSelector()));
    if (shares_selector())
      selectors.push_back(CudaAnotherBytes(method_, budgets_, RowsForSelector()));
    for (const absl::StatusOr<int64_t>& one : selectors) {
      RETURN_IF_ERROR(one.status());
      bytes += *one;
    }
    ASSIGN_OR_RETURN(const int64_t shareable, ShareableBytes());
    return CudaZoneBytes{bytes, shareable, Shared<const Held>::Held(key_)};
  }

  absl::Status Load(int64_t, const cuda::Stream& stream) override {
    ASSIGN_OR_RETURN(held_, Shared<const Held>::Of(key_, [&] { return Hold(stream); }));
    ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { Lay(arena); }));
    if (held_->selector != nullptr) {
      ASSIGN_OR_RETURN(selector_, held_->selector->Another());
    } else if (chooses()) {
      ASSIGN_OR_RETURN(selector_, MakeSelector(*held_, stream));
    }
    if (!summaries_.empty()) RETURN_IF_ERROR(summaries_.Load(*context_.rows, context_.pool));
    if (banks_ == nullptr) return absl::OkStatus();
    return banks_->Fill(held_->rows, selector_.get(), stream);
  }
  absl::Status Reset(const cuda::Stream& stream) override {
    return banks_ == nullptr ? absl::OkStatus() : banks_->Reset(stream);
  }

  int64_t phases() const override { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const override {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }

  int64_t predicted_tokens(int64_t) const override {
    return banks_ != nullptr && config_.prefetch != Prefetch::kOff ? 1 : 0;
  }
  bool predicts(Layer layer, int64_t n) const override {
    return banks_ != nullptr && n == 1 && banks_->fetches_ahead(layer);
  }
  absl::Status Predict(Layer next, const CudaQueries& queries,
                       const cuda::Stream& stream) override {
    return banks_->Predict(next, queries, stream);
  }

  bool adds_alone() const override {
    return selector_ != nullptr && (!selector_->shares_launches() || !summaries_.empty());
  }
  void Add(Layer layer, const uint16_t* q, int64_t phase, bool fetched, const CudaPartial& to,
           CudaZoneWork& work) const override {
    if (budgets_.dense(layer)) {
      work.to_all.push_back(ToAll(q, AllRows(layer), to));
      return;
    }
    // The launch that chooses may attend to what it chose: keys and V lie on the device as they are.
    const bool attends = banks_ == nullptr && selector_->attends(layer);
    selector_->Add({layer, q, phase, attends ? to : CudaPartial()}, work.choices);
    const CudaSelection selection = selector_->selection(layer);
    const CudaPlaces places = banks_ == nullptr ? CudaPlaces{AllRows(layer)}
                                                : banks_->Bring(layer, selection, fetched, work);
    if (places.gathered) {
      work.to_all.push_back(ToAll(q, places.kv, to));
    } else if (!attends) {
      work.to_chosen.push_back(ToChosen(q, selection, places, to));
    }
    if (summaries_.empty()) return;
    work.to_rest.push_back(summaries_.ToRest(layer, q, selection, places, to));
  }

  // Token by token: what one chose lies where the next one's will.
  absl::Status Attend(Layer layer, const CudaQueries& queries, int64_t phase, const CudaPartial& to,
                      const cuda::Stream& stream) override {
    const int64_t rows = zone_.rows();
    if (takes_all()) {
      return AttendBlock(shape_, queries, AllRows(layer), rows, rows, to, stream);
    }
    const int64_t heads = shape_.q_heads, width = heads * shape_.head_dim;
    for (int64_t i = 0; i < queries.n; ++i) {
      CudaZoneWork work;
      Add(layer, queries.rounded + i * width, phase, predicts(layer, queries.n),
          {to.out + i * width, to.lse + i * heads}, work);
      RETURN_IF_ERROR(work.Launch(stream));
    }
    return absl::OkStatus();
  }

  bool prompt_takes_all() const override { return prompt_takes_all_; }
  absl::Status CopyCounters(const cuda::Stream& stream) override {
    return banks_ == nullptr ? absl::OkStatus() : banks_->CopyCounters(stream);
  }
  void Count(int64_t n) override {
    CudaZoneAttention::Count(n);
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      LayerStatistics& counted = statistics_[static_cast<size_t>(layer.value())];
      const CudaSelection selection = budgets_.dense(layer) || takes_all()
                                          ? CudaSelection{.rows = zone_.rows()}
                                          : selector_->selection(layer);
      const int64_t heads = shape_.kv_heads;
      const int64_t rows =
          n * (selection.total_rows >= 0 ? selection.total_rows : heads * selection.rows);
      counted.rows_attended += rows;
      counted.whole_tokens += takes_all() ? n : 0;
      counted.whole_rows += takes_all() ? rows : 0;
    }
  }

  std::vector<LayerStatistics> statistics() const override {
    std::vector<LayerStatistics> layers = statistics_;
    if (banks_ != nullptr) banks_->Count(layers);
    return layers;
  }

 private:
  // Of all sequences over the content: the rows, and what the method keeps of them.
  struct Held {
    model::GpuReservation reserved;
    CudaZoneRows rows;
    std::unique_ptr<CudaRowSelector> selector;  // null: each makes its own, or none chooses
  };

  int64_t RowBytes() const { return CudaZoneRows::DeviceBytes(context_, banks_ == nullptr); }
  absl::StatusOr<int64_t> ShareableBytes() const {
    if (key_.empty()) return 0;
    if (!shares_selector()) return RowBytes();
    ASSIGN_OR_RETURN(const int64_t selector,
                     CudaRowSelectorBytes(method_, budgets_, RowsForSelector()));
    return RowBytes() + selector;
  }
  // Where the method is calibrated by them.
  const HostRows* RowsForSelector() const {
    return MethodOf(method_).needs_host_rows(method_) ? context_.rows.get() : nullptr;
  }
  bool chooses() const { return budgets_.largest_budget() > 0; }
  bool shares_selector() const { return chooses() && MethodOf(method_).forks(); }
  bool takes_all() const { return reading_prompt_ && prompt_takes_all_; }

  void Lay(cuda::DeviceArena& arena) {
    if (banks_ != nullptr) banks_->Lay(arena);
    workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(
        kernels::DecodeWorkspaceBytes(shape_.kv_heads, shape_.group(), shape_.head_dim, splits_)));
    if (config_.estimate == Estimate::kOn && chooses())
      summaries_ = CudaSummaries(budgets_, *context_.rows, arena);
  }

  Shared<const Held>::Made Hold(const cuda::Stream& stream) const {
    auto held = std::make_shared<Held>();
    ASSIGN_OR_RETURN(const int64_t shareable, ShareableBytes());
    held->reserved = model::GpuReservation(shareable);
    ASSIGN_OR_RETURN(
        held->rows,
        CudaZoneRows::Create(context_, banks_ == nullptr ? std::vector<bool>() : banks_->packed()));
    if (shares_selector()) {
      ASSIGN_OR_RETURN(held->selector, MakeSelector(*held, stream));
    }
    return held;
  }

  // Of the rows' keys; packed ones are unpacked while it is made.
  absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeSelector(const Held& held,
                                                                const cuda::Stream& stream) const {
    const int64_t rows = zone_.rows();
    const CudaZoneRows& held_rows = held.rows;
    cuda::PinnedBuffer<uint16_t> room;
    CudaKeys keys;
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      keys.layers.push_back(held_rows.is_packed(layer) ? kernels::KvView() : held_rows.kv(layer));
    }
    keys.unpack = [&](Layer layer) -> absl::StatusOr<kernels::KvView> {
      if (room.size() == 0) {
        ASSIGN_OR_RETURN(
            room, cuda::PinnedBuffer<uint16_t>::Create(shape_.kv_heads * rows * shape_.head_dim));
      }
      held_rows.UnpackKeys(layer, context_.pool, room.data());
      return kernels::KvView{.k = room.data(), .row_stride = rows};
    };
    return MakeCudaRowSelector(method_, budgets_, keys, RowsForSelector(), context_.pool, stream);
  }

  // All rows of a dense layer, or of one that chooses and is not packed.
  kernels::KvView AllRows(Layer layer) const {
    return banks_ == nullptr ? held_->rows.kv(layer) : banks_->AllRows(layer);
  }

  // Attention to all rows that there is room for in kv; to what was selected.
  kernels::WindowAttentionCudaParams ToAll(const uint16_t* q, const kernels::KvView& kv,
                                           const CudaPartial& to) const {
    auto params = kernels::OfHeads<kernels::WindowAttentionCudaParams>(shape_);
    params.q = q;
    params.kv = kv;
    params.rows = kv.row_stride;
    params.out = to.out;
    params.lse = to.lse;
    params.splits = std::min(splits_, kernels::DecodeSplits(params.rows, shape_.kv_heads));
    params.workspace = workspace_;
    return params;
  }

  kernels::SparseAttentionCudaParams ToChosen(const uint16_t* q, const CudaSelection& selection,
                                              const CudaPlaces& places,
                                              const CudaPartial& to) const {
    auto params = kernels::OfHeads<kernels::SparseAttentionCudaParams>(shape_);
    params.q = q;
    params.kv = places.kv;
    params.ids = places.places == nullptr ? selection.ids : places.places;
    params.ids_stride = places.places == nullptr ? selection.stride : places.stride;
    params.rows = selection.rows;
    params.row_count = selection.row_count;
    params.out = to.out;
    params.lse = to.lse;
    params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, shape_.kv_heads));
    params.workspace = workspace_;
    return params;
  }

  const SelectorConfig& method_ = *SelectorOf(config_);
  const CudaZoneShape budgets_;
  const int64_t splits_;
  const std::string key_;  // of what is shared; empty: it is this sequence's own
  const bool prompt_takes_all_ = PromptTakesAll(config_, context_.device);
  std::shared_ptr<const Held> held_;
  std::unique_ptr<CudaRowSelector> selector_;  // null: every layer is dense
  cuda::DeviceArena arena_;
  uint8_t* workspace_ = nullptr;               // of attention
  CudaSummaries summaries_;                    // of the estimation term; empty: there is none
  const std::unique_ptr<CudaRowBanks> banks_;  // goes before what its selector refers to
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaHeldZone(const OpenedContext& context) {
  std::unique_ptr<CudaRowBanks> banks;
  if (const auto* const host = std::get_if<HostZoneOptions>(&context.config.zone)) {
    ASSIGN_OR_RETURN(BankPlan plan, PlanBanks(context.selections, context.config.prefetch,
                                              host->bank, context.shape, context.zone.rows()));
    banks = std::make_unique<CudaRowBanks>(*host, context.shape, std::move(plan));
  }
  return std::make_unique<CudaHeldZone>(context, std::move(banks));
}

}  // namespace carrel::decoder
