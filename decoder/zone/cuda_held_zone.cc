// What:      a zone whose rows this process holds: a method that chooses among them on the GPU, and the
//            attention to what it chose. The rows lie on the device; or in pinned memory of this host, and
//            cuda_row_banks.h brings the chosen ones to where attention reads them: then keys that a method reads to
//            choose cross the bus, too, and where it reads none, a layer's rows are packed.
// Math:      dense layers attend to every row, the others to those that the method chooses within the
//            layer's budget (decoder/select/cuda_row_selector.h), and with estimate=on to summaries of the
//            rest. On the device a block of a prompt may attend to every row in one pass (PromptTakesAll).
//            Where rows lie changes no bit.
// Shapes:    on the device of each layer k, v [kv_heads, rows, head_dim] bf16; else cuda_zone_rows.h.
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
#include "decoder/client/row_stream.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/select/method_type.h"
#include "decoder/shared.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_row_banks.h"
#include "decoder/zone/cuda_summaries.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/cuda_zone_rows.h"
#include "decoder/zone/make_zone.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/of_heads.h"
#include "model/device.h"

namespace carrel::decoder {
namespace {

// What parts of a zone that sequences share depend on (shared.h); empty where the content has no id.
std::string SharedZoneKey(const OpenedContext& context, const std::string& place,
                          const SelectorConfig& method, const CudaZoneShape& shape) {
  int device = 0;
  if (context.content_id.empty() || cudaGetDevice(&device) != cudaSuccess) return "";
  return absl::StrCat(place, " ", device, " ", context.content_id, " ", shape.zone.begin, " ",
                      shape.zone.end, " ", DescribeSelector(method), " ",
                      absl::StrJoin(shape.budgets, ","), " ",
                      absl::StrJoin(shape.head_budgets, ","));
}

std::string PlaceName(const CudaRowBanks* banks) {
  std::string place = banks == nullptr ? "device" : "host ";
  for (size_t l = 0; banks != nullptr && l < banks->packed().size(); ++l)
    place += banks->packed()[l] ? '1' : '0';
  return place;
}

class CudaHeldZone final : public CudaZoneAttention {
 public:
  // banks: of rows in pinned memory of this host; null: they lie on the device. context.rows: where NeedsHostRows, or
  // estimate=on: then it has summaries; in pinned memory they are copied, where they are given.
  CudaHeldZone(const OpenedContext& context, std::unique_ptr<CudaRowBanks> banks)
      : CudaZoneAttention(context),
        shape_{context.shape, context.zone,
               banks == nullptr ? Budgets(context.selections) : banks->budgets(),
               HeadBudgets(context.selections, context.shape.kv_heads)},
        splits_(kernels::DecodeSplits(shape_.zone.rows(), shape_.heads.kv_heads)),
        key_(SharedZoneKey(context, PlaceName(banks.get()), method_, shape_)),
        banks_(std::move(banks)) {}

  absl::StatusOr<int64_t> Bytes() override {
    int64_t bytes =
        RowBytes() + cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
    const auto add = [&bytes](absl::StatusOr<int64_t> more) {
      bytes += more.value_or(0);
      return more.status();
    };
    if (banks_ != nullptr && banks_->fetches_ahead()) {
      const std::vector<int64_t> ahead = banks_->budgets_ahead();
      RETURN_IF_ERROR(add(CudaAnotherBytes(method_, shape_, RowsForSelector(), &ahead)));
    }
    if (chooses()) RETURN_IF_ERROR(add(SelectorBytes()));
    if (shares_selector())
      RETURN_IF_ERROR(add(CudaAnotherBytes(method_, shape_, RowsForSelector())));
    return bytes;
  }
  absl::StatusOr<int64_t> ShareableBytes() const override {
    if (key_.empty()) return 0;
    if (!shares_selector()) return RowBytes();
    ASSIGN_OR_RETURN(const int64_t selector, SelectorBytes());
    return RowBytes() + selector;
  }
  bool shareable_held() const override { return Shared<const Held>::Held(key_); }

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
    return banks_->Fill(held_->in_host, selector_.get(), stream);
  }
  absl::Status Reset(const cuda::Stream& stream) override {
    return banks_ == nullptr ? absl::OkStatus() : banks_->Reset(stream);
  }

  int64_t phases() const override { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const override {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }

  int64_t predicted_tokens(int64_t) const override {
    return banks_ != nullptr && context_.config.prefetch != Prefetch::kOff ? 1 : 0;
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
  void Add(Layer layer, const uint16_t* q, int64_t phase, const CudaPartial& to,
           CudaZoneWork& work) const override {
    AddToken(layer, q, phase, predicts(layer, 1), to, work);
  }
  // Token by token: what one chose lies where the next one's will.
  absl::Status Attend(Layer layer, const CudaQueries& queries, int64_t phase, const CudaPartial& to,
                      const cuda::Stream& stream) override {
    const int64_t rows = shape_.zone.rows();
    if (takes_all()) {
      return AttendBlock(shape_.heads, queries, AllRows(layer), rows, rows, to, stream);
    }
    const int64_t heads = shape_.heads.q_heads, width = heads * shape_.heads.head_dim;
    for (int64_t i = 0; i < queries.n; ++i) {
      CudaZoneWork work;
      AddToken(layer, queries.rounded + i * width, phase, predicts(layer, queries.n),
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
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      LayerStatistics& counted = statistics_[static_cast<size_t>(layer.value())];
      const int64_t rows = n * Attended(layer);
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
    CudaWindow on_device;  // or
    CudaZoneRows in_host;
    std::unique_ptr<CudaRowSelector> selector;  // null: each makes its own, or none chooses
  };

  // What the rows take on the device.
  int64_t RowBytes() const {
    return banks_ == nullptr ? CudaWindow::Bytes(shape_.heads, shape_.zone.rows())
                             : CudaZoneRows::DeviceBytes(shape_.heads);
  }
  absl::StatusOr<int64_t> SelectorBytes() const {
    return CudaRowSelectorBytes(method_, shape_, RowsForSelector());
  }
  // Where the method is calibrated by them.
  const HostRows* RowsForSelector() const {
    return MethodOf(method_).needs_host_rows(method_) ? context_.rows.get() : nullptr;
  }
  bool chooses() const { return shape_.largest_budget() > 0; }
  bool shares_selector() const { return chooses() && MethodOf(method_).forks(); }
  bool takes_all() const { return reading_prompt_ && prompt_takes_all_; }

  void Lay(cuda::DeviceArena& arena) {
    const AttentionShape& heads = shape_.heads;
    if (banks_ != nullptr) banks_->Lay(arena);
    workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(
        kernels::DecodeWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, splits_)));
    if (context_.config.estimate == Estimate::kOn && chooses())
      summaries_ = CudaSummaries(shape_, *context_.rows, arena);
  }

  Shared<const Held>::Made Hold(const cuda::Stream& stream) const {
    auto held = std::make_shared<Held>();
    ASSIGN_OR_RETURN(const int64_t shareable, ShareableBytes());
    held->reserved = model::GpuReservation(shareable);
    if (banks_ != nullptr) {
      ASSIGN_OR_RETURN(held->in_host, CudaZoneRows::Create(context_, banks_->packed()));
    } else {
      RETURN_IF_ERROR(ReadToDevice(held->on_device));
    }
    if (shares_selector()) {
      ASSIGN_OR_RETURN(held->selector, MakeSelector(*held, stream));
    }
    return held;
  }
  absl::Status ReadToDevice(CudaWindow& rows) const {
    const RowRange zone = shape_.zone;
    ASSIGN_OR_RETURN(rows, CudaWindow::Create(shape_.heads, zone.rows()));
    return ReadContextRows(
        context_.client, shape_.heads, [&](Layer) { return absl::MakeConstSpan(&zone, 1); },
        context_.max_fetch_rows,
        [&](const ContextRows& block) {
          return rows.CopyRows(block.layer, block.head, block.first - zone.begin, block.rows,
                               block.k, block.v);
        });
  }

  // Of the rows' keys; packed ones are unpacked while it is made.
  absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeSelector(const Held& held,
                                                                const cuda::Stream& stream) const {
    const AttentionShape& heads = shape_.heads;
    const int64_t rows = shape_.zone.rows();
    const CudaZoneRows& in_host = held.in_host;
    cuda::PinnedBuffer<uint16_t> room;
    CudaKeys keys;
    for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
      keys.layers.push_back(banks_ == nullptr          ? held.on_device.kv(layer)
                            : in_host.is_packed(layer) ? kernels::KvView()
                                                       : in_host.kv(layer));
    }
    keys.unpack = [&](Layer layer) -> absl::StatusOr<kernels::KvView> {
      if (room.size() == 0) {
        ASSIGN_OR_RETURN(
            room, cuda::PinnedBuffer<uint16_t>::Create(heads.kv_heads * rows * heads.head_dim));
      }
      in_host.UnpackKeys(layer, context_.pool, room.data());
      return kernels::KvView{.k = room.data(), .row_stride = rows};
    };
    return MakeCudaRowSelector(method_, shape_, keys, RowsForSelector(), context_.pool, stream);
  }

  // All rows of a dense layer, or of one that chooses and is not packed.
  kernels::KvView AllRows(Layer layer) const {
    if (banks_ == nullptr) return held_->on_device.kv(layer);
    return banks_->AllRows(layer);
  }
  int64_t Attended(Layer layer) const {  // rows of one token
    const int64_t heads = shape_.heads.kv_heads;
    if (shape_.dense(layer) || takes_all()) return heads * shape_.zone.rows();
    const CudaSelection selection = selector_->selection(layer);
    return selection.total_rows >= 0 ? selection.total_rows : heads * selection.rows;
  }

  // Attention to all rows that there is room for in kv; to what was selected.
  kernels::WindowAttentionCudaParams ToAll(const uint16_t* q, const kernels::KvView& kv,
                                           const CudaPartial& to) const {
    const AttentionShape& heads = shape_.heads;
    auto params = kernels::OfHeads<kernels::WindowAttentionCudaParams>(heads);
    params.q = q;
    params.kv = kv;
    params.rows = kv.row_stride;
    params.out = to.out;
    params.lse = to.lse;
    params.splits = std::min(splits_, kernels::DecodeSplits(params.rows, heads.kv_heads));
    params.workspace = workspace_;
    return params;
  }

  kernels::SparseAttentionCudaParams ToChosen(const uint16_t* q, const CudaSelection& selection,
                                              const CudaSummaries::SelectedRows& places,
                                              const CudaPartial& to) const {
    const AttentionShape& heads = shape_.heads;
    auto params = kernels::OfHeads<kernels::SparseAttentionCudaParams>(heads);
    params.q = q;
    params.kv = places.kv;
    params.ids = places.places == nullptr ? selection.ids : places.places;
    params.ids_stride = places.places == nullptr ? selection.stride : places.places_stride;
    params.rows = selection.rows;
    params.row_count = selection.row_count;
    params.out = to.out;
    params.lse = to.lse;
    params.splits = std::min(splits_, kernels::DecodeSplits(selection.rows, heads.kv_heads));
    params.workspace = workspace_;
    return params;
  }

  void AddToken(Layer layer, const uint16_t* q, int64_t phase, bool fetched, const CudaPartial& to,
                CudaZoneWork& work) const {
    if (shape_.dense(layer)) {
      work.to_all.push_back(ToAll(q, AllRows(layer), to));
      return;
    }
    // The launch that chooses may attend to what it chose: keys and V lie on the device as they are.
    const bool attends = banks_ == nullptr && selector_->attends(layer);
    const CudaAttendSelected attend =
        attends ? CudaAttendSelected{to.out, to.lse} : CudaAttendSelected();
    selector_->Add({layer, q, phase, attend}, work.choices);
    const CudaSelection selection = selector_->selection(layer);
    const CudaSummaries::SelectedRows places = banks_ == nullptr
                                                   ? CudaSummaries::SelectedRows{AllRows(layer)}
                                                   : banks_->Bring(layer, selection, fetched, work);
    if (places.gathered) {
      work.to_all.push_back(ToAll(q, places.kv, to));
    } else if (!attends) {
      work.to_chosen.push_back(ToChosen(q, selection, places, to));
    }
    if (summaries_.empty()) return;
    work.to_rest.push_back(summaries_.ToRest(layer, q, selection, places, to.out, to.lse));
  }

  const SelectorConfig& method_ = *SelectorOf(context_.config);
  const CudaZoneShape shape_;
  const int64_t splits_;
  const std::string key_;  // of what is shared; empty: it is this sequence's own
  const bool prompt_takes_all_ = PromptTakesAll(context_.config, context_.device);
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
    ASSIGN_OR_RETURN(banks, CudaRowBanks::Create(*host, context));
  }
  return std::make_unique<CudaHeldZone>(context, std::move(banks));
}

}  // namespace carrel::decoder
