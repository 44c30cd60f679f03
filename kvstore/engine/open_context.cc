#include "kvstore/engine/open_context.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

std::string Place(const std::string& context, Layer layer, KvHead kv_head) {
  return absl::StrCat("context=", context, " layer=", layer.value(), " kv_head=", kv_head.value());
}

std::atomic<int64_t> openings{0};

}  // namespace

OpenContext::OpenContext(std::shared_ptr<const StoredContext> stored, IndexCache* indexes,
                         ResidentBudget* budget, LayerLoader* loader)
    : opening_(openings.fetch_add(1)),
      stored_(std::move(stored)),
      indexes_(indexes),
      budget_(budget),
      loader_(loader) {}

OpenContext::~OpenContext() { indexes_->DropContext(id_); }

absl::StatusOr<std::shared_ptr<OpenContext>> OpenContext::Create(
    std::shared_ptr<const StoredContext> stored, IndexCache* indexes, ResidentBudget* budget,
    LayerLoader* loader) {
  std::shared_ptr<OpenContext> context(new OpenContext(std::move(stored), indexes, budget, loader));
  RETURN_IF_ERROR(Annotate(context->ReadManifest(),
                           absl::StrCat("context ", context->manifest().name(), ": manifest")));
  return context;
}

const v1::Manifest& OpenContext::manifest() const { return stored_->manifest(); }

absl::Status OpenContext::ReadManifest() {
  const v1::Manifest& m = manifest();
  name_ = m.name();
  ASSIGN_OR_RETURN(id_, ContextIdOf(m));
  if (m.kv_dtype() != "bf16") {
    return absl::FailedPreconditionError(
        absl::StrCat("kv_dtype=\"", m.kv_dtype(), "\" is not one that this program reads (bf16)"));
  }
  if (m.key_position() != "after_rope" && m.key_position() != "none") {
    return absl::FailedPreconditionError(absl::StrCat("key_position=\"", m.key_position(),
                                                      "\" is not one that this program reads "
                                                      "(after_rope, none)"));
  }
  RETURN_IF_ERROR(CheckManifest(m));
  shape_ = {.layers = static_cast<int32_t>(m.layers()),
            .q_heads = static_cast<int32_t>(m.q_heads()),
            .kv_heads = static_cast<int32_t>(m.kv_heads()),
            .head_dim = static_cast<int32_t>(m.head_dim())};
  tokens_ = m.tokens();
  scale_ = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  ASSIGN_OR_RETURN(index_params_, HeadIndexParamsOf(m));
  // Where a search does not know its rows before it reads them, a layer's first search had better
  // read the layer.
  const bool few =
      std::all_of(index_params_.begin(), index_params_.end(),
                  [](const IndexParams& params) { return IndexTypeOf(params.kind).reads_few(); });
  if (few) stored_->Expect(FileAccess::kSparse);
  layers_ = std::make_unique<ResidentBudget::Layers>(budget_, stored_, shape_.layers);
  changes_ = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(shape_.layers));
  slots_ = std::make_unique<Slot[]>(static_cast<size_t>(shape_.layers) * shape_.kv_heads);
  // No memory before a head is scanned.
  int8_memory_ =
      Int8Memory::Make(int64_t{shape_.layers} * shape_.kv_heads, tokens_, shape_.head_dim);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> OpenContext::Look(Layer layer) const {
  ASSIGN_OR_RETURN(const int64_t changes, stored_->Look(layer.value()));
  std::atomic<int64_t>& known = changes_[static_cast<size_t>(layer.value())];
  for (int64_t before = known.load(std::memory_order_acquire); before < changes;) {
    if (!known.compare_exchange_weak(before, changes)) continue;
    indexes_->DropChanged(id_, opening_, layer, changes);
    spdlog::warn("context {}: files of layer {} changed on disk; they are verified again", name_,
                 layer.value());
    break;
  }
  return changes;
}

absl::StatusOr<int64_t> OpenContext::LookAtAll() const {
  int64_t changes = 0;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    ASSIGN_OR_RETURN(const int64_t of_layer, Look(layer));
    changes += of_layer;
  }
  return changes;
}

void OpenContext::FreshSlot(Slot& slot, Layer layer) const {
  const int64_t changes =
      changes_[static_cast<size_t>(layer.value())].load(std::memory_order_acquire);
  if (slot.changes == changes) return;
  slot.rows.reset();
  slot.summaries.reset();
  slot.changes = changes;
}

absl::StatusOr<std::shared_ptr<const MappedHead>> OpenContext::Head(Layer layer,
                                                                    KvHead kv_head) const {
  Slot& slot = slots_[static_cast<size_t>(layer.value()) * shape_.kv_heads + kv_head.value()];
  absl::MutexLock lock(&slot.mu);
  FreshSlot(slot, layer);
  if (slot.rows != nullptr) return slot.rows;
  auto rows = std::make_shared<MappedHead>();
  ASSIGN_OR_RETURN(rows->keys, Rows::OpenKeys(*stored_, layer, kv_head));
  ASSIGN_OR_RETURN(rows->values, Rows::OpenValues(*stored_, layer, kv_head));
  if (rows->keys.count() != tokens_ || rows->values.count() != tokens_ ||
      rows->keys.head_dim() != shape_.head_dim || rows->values.head_dim() != shape_.head_dim) {
    return absl::DataLossError(absl::StrCat(rows->keys.count(), " K rows and ",
                                            rows->values.count(), " V rows instead of ", tokens_,
                                            " (", Place(name_, layer, kv_head), ")"));
  }
  ASSIGN_OR_RETURN(rows->exact,
                   OpenIndex(IndexParams{.kind = IndexKind::kFlat}, Blob(), rows->keys));
  rows->scan = std::make_unique<Int8Scan>(rows->keys, Int8Memory::Piece());
  rows->changes = slot.changes;
  slot.rows = std::move(rows);
  // A layer's heads are opened before the first of them is searched: their blobs come meanwhile.
  if (IndexTypeOf(ParamsOf(layer, kv_head).kind).reads_few()) {
    ASSIGN_OR_RETURN(const Blob blob, Blob::Open(*stored_, layer, Kind::kIndex, kv_head));
    blob.AskAhead();
  }
  return slot.rows;
}

absl::Status OpenContext::ChangesTooOften() const {
  return absl::DataLossError(absl::StrCat("context ", name_, ": its files changed ", kMostAttempts,
                                          " times while one answer was made of them"));
}

absl::Status OpenContext::CheckSummaries() const {
  if (manifest().summary_rows() > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "estimate: context ", name_, " has no summaries; make one that has them with carrel prefill ",
      "--summaries 40, or carrel reindex ", name_, " --summaries 40"));
}

absl::StatusOr<std::shared_ptr<const Summaries>> OpenContext::HeadSummaries(Layer layer,
                                                                            KvHead kv_head) const {
  RETURN_IF_ERROR(CheckSummaries());
  Slot& slot = slots_[static_cast<size_t>(layer.value()) * shape_.kv_heads + kv_head.value()];
  absl::MutexLock lock(&slot.mu);
  FreshSlot(slot, layer);
  if (slot.summaries != nullptr) return slot.summaries;
  ASSIGN_OR_RETURN(Blob blob, Blob::Open(*stored_, layer, Kind::kSummaries, kv_head));
  absl::StatusOr<Summaries> summaries = Summaries::Open(std::move(blob), tokens_, shape_.head_dim);
  if (!summaries.ok()) return Annotate(summaries.status(), Place(name_, layer, kv_head));
  slot.summaries = std::make_shared<const Summaries>(*std::move(summaries));
  return slot.summaries;
}

absl::StatusOr<std::shared_ptr<const OpenContext::QueryDrift>> OpenContext::ReadDrift() const {
  absl::MutexLock lock(&drift_mu_);
  if (drift_ != nullptr) return drift_;
  ASSIGN_OR_RETURN(int64_t before, LookAtAll());
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    absl::StatusOr<QueryDrift> drift = ReadDriftOfLayers();
    ASSIGN_OR_RETURN(const int64_t after, LookAtAll());
    if (before == after) {
      if (!drift.ok()) return drift.status();
      drift_ = std::make_shared<const QueryDrift>(*std::move(drift));
      return drift_;
    }
    before = after;
  }
  return ChangesTooOften();
}

absl::StatusOr<OpenContext::QueryDrift> OpenContext::ReadDriftOfLayers() const {
  QueryDrift drift;
  bool any = false;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    ASSIGN_OR_RETURN(std::vector<float> of_layer, ReadQueryDrift(*stored_, layer));
    any = any || !of_layer.empty();
    drift.push_back(std::move(of_layer));
  }
  if (!any) drift.clear();
  return drift;
}

const IndexParams& OpenContext::ParamsOf(Layer layer, KvHead kv_head) const {
  return index_params_[static_cast<size_t>(layer.value()) * shape_.kv_heads + kv_head.value()];
}

bool OpenContext::ScansAll(Layer layer, KvHead kv_head) const {
  return IndexTypeOf(ParamsOf(layer, kv_head).kind).exact();
}

absl::Status OpenContext::WithIndex(Layer layer, KvHead kv_head, const MappedHead& rows,
                                    absl::FunctionRef<absl::Status(const Index&)> search) const {
  const IndexParams& params = ParamsOf(layer, kv_head);
  if (ScansAll(layer, kv_head)) return WithScan(layer, kv_head, rows, search);
  Blob blob;
  absl::StatusOr<IndexCache::Lease> lease = indexes_->Acquire(
      {id_, layer, kv_head, opening_, rows.changes},
      [&]() -> absl::StatusOr<int64_t> {
        ASSIGN_OR_RETURN(blob, Blob::Open(*stored_, layer, Kind::kIndex, kv_head));
        return IndexTypeOf(params.kind).HeapBytes(blob.size());
      },
      [&] { return OpenIndex(params, std::move(blob), rows.keys); });
  if (!lease.ok()) {
    return Annotate(lease.status(),
                    absl::StrCat("loading the index (", Place(name_, layer, kv_head), ")"));
  }
  return search(**lease);
}

absl::Status OpenContext::WithScan(Layer layer, KvHead kv_head, const MappedHead& rows,
                                   absl::FunctionRef<absl::Status(const Int8Scan&)> search) const {
  const int64_t head = int64_t{layer.value()} * shape_.kv_heads + kv_head.value();
  const int64_t bytes = int8_memory_ == nullptr ? 0 : int8_memory_->piece_bytes();
  const std::optional<IndexCache::Lease> lease = indexes_->TryAcquire(
      {id_, layer, kv_head, opening_, rows.changes, /*scan=*/true}, bytes,
      [&] { return int8_memory_ != nullptr && budget_->HasSpareRoom(bytes); },
      [&]() -> std::unique_ptr<Index> {
        Int8Memory::Piece piece = Int8Memory::Take(int8_memory_, head);
        if (piece.empty()) return nullptr;  // what is kept of other rows is not gone yet
        return std::make_unique<Int8Scan>(rows.keys, std::move(piece));
      });
  return search(lease.has_value() ? static_cast<const Int8Scan&>(**lease) : *rows.scan);
}

}  // namespace carrel::kvstore
