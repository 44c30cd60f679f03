// What:   loaded indexes of all open contexts within one budget of heap bytes. An index that is in
//         use stays; of the others the least recently used goes first. Who needs room that indexes
//         in use take, waits for them. Spare ones (TryAcquire), which only make searches faster, wait
//         for nobody and take nobody's room.
// Errors: ResourceExhausted an index larger than the whole budget (names both sizes); those of the
//         source.
// Ownership: the cache outlives its leases.
// Threads: any, but nobody may Acquire while holding a lease: with that rule no wait is circular.
//
// Invariants
//   1. The charges of all entries are at most the budget when a load starts. A load is charged with
//      its blob's size, and afterwards with what the index says it holds.
//   2. One thread loads an index; others that need it wait for that.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/ids.h"
#include "kvstore/format/context_id.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

struct IndexKey {
  ContextId context;
  Layer layer;
  KvHead kv_head;
  // Of this opening of the context, whose rows the index reads, and of the layer's files
  // (StoredContext::Look) when it was asked for.
  int64_t opening = 0;
  int64_t changes = 0;
  bool scan = false;  // of the keys in 8 bits (Int8Scan), beside the head's index
  bool operator==(const IndexKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const IndexKey& key) {
    return H::combine(std::move(h), key.context, key.layer, key.kv_head, key.opening, key.changes,
                      key.scan);
  }
};

class IndexCache {
 private:
  struct Entry;

 public:
  // An index in use; it is given back on destruction, which must precede the cache's.
  class Lease {
   public:
    Lease(IndexCache* cache, std::shared_ptr<Entry> entry);
    ~Lease();
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    const Index& operator*() const;
    const Index* operator->() const { return &**this; }

   private:
    IndexCache* cache_;
    std::shared_ptr<Entry> entry_;
  };

  struct Counters {
    int64_t resident_bytes = 0;
    int64_t loads = 0;
    int64_t evictions = 0;
  };

  explicit IndexCache(int64_t budget_bytes) : budget_bytes_(budget_bytes) {}

  // On a miss calls blob_bytes and then load, on this thread and without a lock.
  absl::StatusOr<Lease> Acquire(const IndexKey& key,
                                absl::FunctionRef<absl::StatusOr<int64_t>()> blob_bytes,
                                absl::FunctionRef<absl::StatusOr<std::unique_ptr<Index>>()> load);

  // On a miss calls admit and then make, on this thread and without a lock. None: the index is being
  // loaded, `bytes` more would be beyond the budget, or either of the two refused (false, null).
  // bytes: what it holds, now or later.
  std::optional<Lease> TryAcquire(const IndexKey& key, int64_t bytes,
                                  absl::FunctionRef<bool()> admit,
                                  absl::FunctionRef<std::unique_ptr<Index>()> make);
  // Drops spare indexes without a lease, the least recently used first, until this much is free.
  void Shed(int64_t bytes);

  // Forgets what was opened of a layer before its files changed for the changes-th time.
  void DropChanged(ContextId context, int64_t opening, Layer layer, int64_t changes);
  // Forgets what belongs to a context; what is in use goes when it is given back.
  void DropContext(ContextId context);

  Counters counters() const;

 private:
  absl::Status Load(const IndexKey& key, const std::shared_ptr<Entry>& entry,
                    absl::FunctionRef<absl::StatusOr<int64_t>()> blob_bytes,
                    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Index>>()> load);
  absl::Status Reserve(const IndexKey& key, const std::shared_ptr<Entry>& entry, int64_t bytes);
  void Evict(int64_t wanted_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Remove(const std::shared_ptr<Entry>& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Lease Use(std::shared_ptr<Entry> entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Release(const std::shared_ptr<Entry>& entry);
  void DropIf(absl::FunctionRef<bool(const IndexKey&)> condition);

  const int64_t budget_bytes_;
  mutable absl::Mutex mu_;
  absl::CondVar changed_;  // an index was given back, loaded or dropped
  absl::flat_hash_map<IndexKey, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mu_);
  // Of the loaded ones that are listed; a list's element moves between the two.
  std::list<std::shared_ptr<Entry>> idle_ ABSL_GUARDED_BY(mu_);  // least recently used first
  std::list<std::shared_ptr<Entry>> in_use_ ABSL_GUARDED_BY(mu_);
  int64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t loads_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t evictions_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace carrel::kvstore
