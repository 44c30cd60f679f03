// What:   one open context: its shape, and per layer and KV head the mapped rows, the index
//         and the summaries, each loaded when it is first needed. Shared by all sessions that read
//         it.
// Errors: FailedPrecondition a manifest with conventions that this program does not know; DataLoss
//         a manifest or segment that does not hold together (names context, layer, head).
// Threads: any.   Ownership: keeps its segments mapped, also when the context is deleted.
//
// Invariants
//   1. Rows are handed out unverified: whoever reads a row verifies it first (Rows::Verify).
//   2. An index blob is verified wholly before it is parsed.
//   3. After a change of a layer's files nothing that was opened before it is handed out.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/ids.h"
#include "kvstore/engine/index_cache.h"
#include "kvstore/engine/layer_loader.h"
#include "kvstore/engine/resident_budget.h"
#include "kvstore/index/index.h"
#include "kvstore/index/int8_scan.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::kvstore {

class StoredContext;
class Summaries;

// The rows of one layer and KV head, and what needs nothing but them: the exact index, and the scan
// that keeps nothing.
struct MappedHead {
  Rows keys;
  Rows values;
  std::unique_ptr<Index> exact;
  std::unique_ptr<Int8Scan> scan;
  int64_t changes = 0;  // of the layer's files, as they were opened
};

class OpenContext {
 public:
  static absl::StatusOr<std::shared_ptr<OpenContext>> Create(
      std::shared_ptr<const StoredContext> stored, IndexCache* indexes, ResidentBudget* budget,
      LayerLoader* loader);
  ~OpenContext();

  // The layer is about to be read: to be called before each search in it.
  void Touch(Layer layer) const {
    TouchAlone(layer);
    EnforceBudget();
  }
  // The same in two halves: the second asks the kernel, which takes longer than a head's share of a layer
  // should wait.
  void TouchAlone(Layer layer) const {
    layers_->Touch(layer.value());
    loader_->Touch(stored_, layer);
  }
  void EnforceBudget() const { budget_->EnforceAtTimes(); }

  // As StoredContext::Look: a reply is right if this gives the same before its first read of the
  // layer and after its last. The rows, indexes and summaries are then those of that number.
  absl::StatusOr<int64_t> Look(Layer layer) const;
  absl::StatusOr<int64_t> LookAtAll() const;
  // What the last Look gave, without another one: if a later one gives the same, no byte changed between them.
  int64_t LastLook(Layer layer) const {
    return changes_[static_cast<size_t>(layer.value())].load(std::memory_order_acquire);
  }
  // Attempts at an answer until Look gives the same before and after, and what then is said.
  static constexpr int kMostAttempts = 4;
  absl::Status ChangesTooOften() const;
  const std::shared_ptr<const StoredContext>& stored() const { return stored_; }

  const v1::Manifest& manifest() const;
  const std::string& name() const { return name_; }
  const AttentionShape& shape() const { return shape_; }
  int64_t tokens() const { return tokens_; }
  float scale() const { return scale_; }  // 1 / sqrt(head_dim)

  absl::StatusOr<std::shared_ptr<const MappedHead>> Head(Layer layer, KvHead kv_head) const;

  // FailedPrecondition: the context has none.
  absl::StatusOr<std::shared_ptr<const Summaries>> HeadSummaries(Layer layer, KvHead kv_head) const;
  absl::Status CheckSummaries() const;  // that it has them, by its manifest

  // Of each layer as ReadQueryDrift; empty: no layer has one. Read once; blocks then.
  using QueryDrift = std::vector<std::vector<float>>;
  absl::StatusOr<std::shared_ptr<const QueryDrift>> ReadDrift() const;

  // Whether the context's index of the head scores every row, whatever is wanted.
  bool ScansAll(Layer layer, KvHead kv_head) const;
  // Calls `search` with that index; it stays loaded meanwhile. `search` must not come back here.
  absl::Status WithIndex(Layer layer, KvHead kv_head, const MappedHead& rows,
                         absl::FunctionRef<absl::Status(const Index&)> search) const;

  // The same with a scan of every row, of whatever head, that keeps the head's keys in 8 bits while memory has
  // room for it, else with one that does not; both give the same.
  absl::Status WithScan(Layer layer, KvHead kv_head, const MappedHead& rows,
                        absl::FunctionRef<absl::Status(const Int8Scan&)> search) const;

  // Sessions that read it; kept by the engine.
  std::atomic<int64_t> sessions{0};

 private:
  struct Slot {
    absl::Mutex mu;
    int64_t changes ABSL_GUARDED_BY(mu) = 0;  // of the layer's files, as both were opened
    std::shared_ptr<const MappedHead> rows ABSL_GUARDED_BY(mu);
    std::shared_ptr<const Summaries> summaries ABSL_GUARDED_BY(mu);
  };

  OpenContext(std::shared_ptr<const StoredContext> stored, IndexCache* indexes,
              ResidentBudget* budget, LayerLoader* loader);
  absl::Status ReadManifest();
  // Locked; what was opened before the last change is gone.
  void FreshSlot(Slot& slot, Layer layer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(slot.mu);
  absl::StatusOr<QueryDrift> ReadDriftOfLayers() const;
  const IndexParams& ParamsOf(Layer layer, KvHead kv_head) const;

  const int64_t opening_;  // one number per object of this process
  const std::shared_ptr<const StoredContext> stored_;
  IndexCache* const indexes_;
  ResidentBudget* const budget_;
  LayerLoader* const loader_;
  std::unique_ptr<ResidentBudget::Layers> layers_;
  // Constant after Create.
  std::string name_;
  ContextId id_;
  AttentionShape shape_;
  int64_t tokens_ = 0;
  float scale_ = 0;
  std::vector<IndexParams> index_params_;    // [layers, kv_heads]
  std::unique_ptr<Slot[]> slots_;            // [layers, kv_heads]
  std::shared_ptr<Int8Memory> int8_memory_;  // of heads that are scanned; null: there is none

  mutable std::unique_ptr<std::atomic<int64_t>[]> changes_;  // [layers]: as Look gave last

  mutable absl::Mutex drift_mu_;
  mutable std::shared_ptr<const QueryDrift> drift_ ABSL_GUARDED_BY(drift_mu_);
};

}  // namespace carrel::kvstore
