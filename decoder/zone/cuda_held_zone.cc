#include "decoder/zone/cuda_held_zone.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/zone/cuda_zone_work.h"
#include "kernels/of_heads.h"

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

}  // namespace

CudaHeldZone::CudaHeldZone(const OpenedContext& context, CudaZoneShape shape,
                           const std::string& place)
    : CudaZoneAttention(context),
      shape_(std::move(shape)),
      splits_(kernels::DecodeSplits(shape_.zone.rows(), shape_.heads.kv_heads)),
      key_(SharedZoneKey(context, place, method_, shape_)) {}

const HostRows* CudaHeldZone::RowsForSelector() const {
  return SelectorNeedsHostRows(method_) ? context_.rows.get() : nullptr;
}

void CudaHeldZone::Lay(cuda::DeviceArena& arena) {
  const AttentionShape& heads = shape_.heads;
  LayPlace(arena);
  workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(
      kernels::DecodeWorkspaceBytes(heads.kv_heads, heads.group(), heads.head_dim, splits_)));
  if (context_.config.estimate == Estimate::kOn && shape_.largest_budget() > 0)
    summaries_ = CudaSummaries(shape_, *context_.rows, arena);
}

absl::StatusOr<int64_t> CudaHeldZone::Bytes() {
  ASSIGN_OR_RETURN(int64_t bytes, BytesBeside());
  if (shape_.largest_budget() > 0) {
    ASSIGN_OR_RETURN(const int64_t selector,
                     CudaRowSelectorBytes(method_, shape_, RowsForSelector()));
    bytes += selector;
  }
  if (shares_selector()) {
    ASSIGN_OR_RETURN(const int64_t own, CudaAnotherBytes(method_, shape_, RowsForSelector()));
    bytes += own;
  }
  return bytes + RowBytes() +
         cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
}

absl::StatusOr<int64_t> CudaHeldZone::ShareableBytes() const {
  if (key_.empty()) return 0;
  if (!shares_selector()) return RowBytes();
  ASSIGN_OR_RETURN(const int64_t selector,
                   CudaRowSelectorBytes(method_, shape_, RowsForSelector()));
  return RowBytes() + selector;
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> CudaHeldZone::MakeSelector(
    const cuda::Stream& stream) const {
  cuda::PinnedBuffer<uint16_t> room;
  return MakeCudaRowSelector(method_, shape_, Keys(room), RowsForSelector(), context_.pool, stream);
}

Shared<const CudaHeldZone::Method>::Made CudaHeldZone::MakeMethod(
    const cuda::Stream& stream) const {
  auto method = std::make_shared<Method>();
  method->rows = rows_held();
  if (!shares_selector()) return method;
  ASSIGN_OR_RETURN(const int64_t bytes, CudaRowSelectorBytes(method_, shape_, RowsForSelector()));
  method->reserved = ReservedIfShared(bytes);
  ASSIGN_OR_RETURN(method->selector, MakeSelector(stream));
  return method;
}

absl::Status CudaHeldZone::Load(int64_t, const cuda::Stream& stream) {
  RETURN_IF_ERROR(HoldRows());
  ASSIGN_OR_RETURN(shared_, Shared<const Method>::Of(key_, [&] { return MakeMethod(stream); }));
  ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { Lay(arena); }));
  if (shared_->selector != nullptr) {
    ASSIGN_OR_RETURN(selector_, shared_->selector->Another());
  } else if (shape_.largest_budget() > 0) {
    ASSIGN_OR_RETURN(selector_, MakeSelector(stream));
  }
  if (!summaries_.empty()) RETURN_IF_ERROR(summaries_.Load(*context_.rows, context_.pool));
  return Fill(stream);
}

int64_t CudaHeldZone::AttendedPerHead(Layer layer) const {
  return shape_.dense(layer) || takes_all() ? shape_.zone.rows() : selector_->selection(layer).rows;
}

int64_t CudaHeldZone::Attended(Layer layer) const {
  const bool all = shape_.dense(layer) || takes_all();
  const int64_t of_heads = all ? -1 : selector_->selection(layer).total_rows;
  return of_heads >= 0 ? of_heads : shape_.heads.kv_heads * AttendedPerHead(layer);
}

void CudaHeldZone::Count(int64_t n) {
  CudaZoneAttention::Count(n);
  for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
    LayerStatistics& counted = statistics_[static_cast<size_t>(layer.value())];
    const int64_t rows = n * Attended(layer);
    counted.rows_attended += rows;
    counted.whole_tokens += takes_all() ? n : 0;
    counted.whole_rows += takes_all() ? rows : 0;
  }
}

kernels::WindowAttentionCudaParams CudaHeldZone::ToAll(const uint16_t* q, const kernels::KvView& kv,
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

kernels::SparseAttentionCudaParams CudaHeldZone::ToChosen(const uint16_t* q,
                                                          const CudaSelection& selection,
                                                          const Places& places,
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

bool CudaHeldZone::adds_alone() const {
  return selector_ != nullptr && (!selector_->shares_launches() || !summaries_.empty());
}

void CudaHeldZone::Add(Layer layer, const uint16_t* q, int64_t phase, const CudaPartial& to,
                       CudaZoneWork& work) const {
  AddToken(layer, q, phase, predicts(layer, 1), to, work);
}

void CudaHeldZone::AddToken(Layer layer, const uint16_t* q, int64_t phase, bool fetched,
                            const CudaPartial& to, CudaZoneWork& work) const {
  if (shape_.dense(layer)) {
    work.to_all.push_back(ToAll(q, AllRows(layer), to));
    return;
  }
  const bool attends = attends_in_place() && selector_->attends(layer);
  const CudaAttendSelected attend =
      attends ? CudaAttendSelected{to.out, to.lse} : CudaAttendSelected();
  selector_->Add({layer, q, phase, attend}, work.choices);
  const CudaSelection selection = selector_->selection(layer);
  const Places places = attends ? Places{AllRows(layer)} : Bring(layer, selection, fetched, work);
  if (places.gathered) {
    work.to_all.push_back(ToAll(q, places.kv, to));
  } else if (!attends) {
    work.to_chosen.push_back(ToChosen(q, selection, places, to));
  }
  if (summaries_.empty()) return;
  work.to_rest.push_back(summaries_.ToRest(layer, q, selection, places, to.out, to.lse));
}

// Token by token: what one chose lies where the next one's will.
absl::Status CudaHeldZone::Attend(Layer layer, const CudaQueries& queries, int64_t phase,
                                  const CudaPartial& to, const cuda::Stream& stream) {
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

}  // namespace carrel::decoder
