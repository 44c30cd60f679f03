#include "kvstore/engine/index_cache.h"

#include <utility>

#include "common/status.h"

namespace carrel::kvstore {

// Guarded by the cache's mu_, but for `index`, which is constant once it is no longer loading.
struct IndexCache::Entry {
  IndexKey key;
  std::shared_ptr<const Index> index;
  int64_t charge = 0;
  int64_t in_use = 0;
  bool loading = true;
  bool spare = false;
  bool listed = true;                                 // in entries_
  std::list<std::shared_ptr<Entry>>::iterator place;  // in idle_ or in_use_; valid if not loading
};

IndexCache::Lease::Lease(IndexCache* cache, std::shared_ptr<Entry> entry)
    : cache_(cache), entry_(std::move(entry)) {}

IndexCache::Lease::~Lease() {
  if (entry_ != nullptr) cache_->Release(entry_);
}

const Index& IndexCache::Lease::operator*() const { return *entry_->index; }

absl::StatusOr<IndexCache::Lease> IndexCache::Acquire(
    const IndexKey& key, absl::FunctionRef<absl::StatusOr<int64_t>()> blob_bytes,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Index>>()> load) {
  std::shared_ptr<Entry> entry;
  {
    absl::MutexLock lock(&mu_);
    for (auto it = entries_.find(key); it != entries_.end(); it = entries_.find(key)) {
      entry = it->second;
      if (!entry->loading) return Use(std::move(entry));
      changed_.Wait(&mu_);
    }
    entry = std::make_shared<Entry>();
    entry->key = key;
    entries_.emplace(key, entry);
  }
  if (absl::Status status = Load(key, entry, blob_bytes, load); !status.ok()) {
    absl::MutexLock lock(&mu_);
    Remove(entry);
    changed_.SignalAll();  // who waited for it tries for itself
    return status;
  }
  return Lease(this, std::move(entry));
}

std::optional<IndexCache::Lease> IndexCache::TryAcquire(
    const IndexKey& key, int64_t bytes, absl::FunctionRef<bool()> admit,
    absl::FunctionRef<std::unique_ptr<Index>()> make) {
  const auto use = [this](std::shared_ptr<Entry> entry) -> std::optional<Lease> {
    mu_.AssertHeld();
    if (entry->loading) return std::nullopt;
    return Use(std::move(entry));
  };
  {
    absl::MutexLock lock(&mu_);
    if (const auto it = entries_.find(key); it != entries_.end()) return use(it->second);
    if (used_bytes_ + bytes > budget_bytes_) return std::nullopt;
  }
  if (!admit()) return std::nullopt;
  const auto entry = std::make_shared<Entry>();
  entry->key = key;
  entry->index = make();
  if (entry->index == nullptr) return std::nullopt;
  entry->spare = true;
  entry->loading = false;
  entry->charge = bytes;
  absl::MutexLock lock(&mu_);
  // Another thread may have made one meanwhile.
  if (const auto it = entries_.find(key); it != entries_.end()) return use(it->second);
  if (used_bytes_ + bytes > budget_bytes_) return std::nullopt;
  used_bytes_ += bytes;
  entry->in_use = 1;
  entry->place = in_use_.insert(in_use_.end(), entry);
  entries_.emplace(key, entry);
  return Lease(this, entry);
}

IndexCache::Lease IndexCache::Use(std::shared_ptr<Entry> entry) {
  if (entry->in_use++ == 0) in_use_.splice(in_use_.end(), idle_, entry->place);
  return Lease(this, std::move(entry));
}

void IndexCache::Shed(int64_t bytes) {
  std::vector<std::shared_ptr<Entry>> victims;  // which end without the lock
  absl::MutexLock lock(&mu_);
  for (auto it = idle_.begin(); it != idle_.end() && bytes > 0;) {
    const std::shared_ptr<Entry> entry = *it++;
    if (!entry->spare) continue;
    bytes -= entry->charge;
    Remove(entry);
    ++evictions_;
    victims.push_back(entry);
  }
}

absl::Status IndexCache::Load(const IndexKey& key, const std::shared_ptr<Entry>& entry,
                              absl::FunctionRef<absl::StatusOr<int64_t>()> blob_bytes,
                              absl::FunctionRef<absl::StatusOr<std::unique_ptr<Index>>()> load) {
  ASSIGN_OR_RETURN(const int64_t bytes, blob_bytes());
  RETURN_IF_ERROR(Reserve(key, entry, bytes));
  ASSIGN_OR_RETURN(std::unique_ptr<Index> index, load());
  const int64_t resident = index->resident_bytes();
  absl::MutexLock lock(&mu_);
  if (entry->listed) {
    used_bytes_ += resident - entry->charge;
    entry->charge = resident;
    entry->place = in_use_.insert(in_use_.end(), entry);
  }
  entry->index = std::move(index);
  entry->loading = false;
  entry->in_use = 1;
  ++loads_;
  Evict(0);
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::Status IndexCache::Reserve(const IndexKey& key, const std::shared_ptr<Entry>& entry,
                                 int64_t bytes) {
  if (bytes > budget_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "index of ", bytes, " bytes (layer=", key.layer.value(), " kv_head=", key.kv_head.value(),
        ") exceeds memory_budget_bytes=", budget_bytes_));
  }
  absl::MutexLock lock(&mu_);
  Evict(bytes);
  while (used_bytes_ + bytes > budget_bytes_) {
    changed_.Wait(&mu_);
    Evict(bytes);
  }
  if (entry->listed) {
    entry->charge = bytes;
    used_bytes_ += bytes;
  }
  return absl::OkStatus();
}

void IndexCache::Evict(int64_t wanted_bytes) {
  while (used_bytes_ + wanted_bytes > budget_bytes_ && !idle_.empty()) {
    const std::shared_ptr<Entry> victim = idle_.front();
    Remove(victim);
    ++evictions_;
  }
}

void IndexCache::Remove(const std::shared_ptr<Entry>& entry) {
  if (!entry->listed) return;
  if (!entry->loading) (entry->in_use > 0 ? in_use_ : idle_).erase(entry->place);
  entry->listed = false;
  used_bytes_ -= entry->charge;
  entries_.erase(entry->key);
}

void IndexCache::Release(const std::shared_ptr<Entry>& entry) {
  absl::MutexLock lock(&mu_);
  if (--entry->in_use > 0) return;
  if (entry->listed) {
    idle_.splice(idle_.end(), in_use_, entry->place);
    Evict(0);
  }
  changed_.SignalAll();
}

void IndexCache::DropIf(absl::FunctionRef<bool(const IndexKey&)> condition) {
  std::vector<std::shared_ptr<Entry>> dropped;  // which end without the lock
  absl::MutexLock lock(&mu_);
  for (const auto& [key, entry] : entries_) {
    if (condition(key)) dropped.push_back(entry);
  }
  for (const std::shared_ptr<Entry>& entry : dropped) Remove(entry);
  changed_.SignalAll();
}

void IndexCache::DropContext(ContextId context) {
  DropIf([&](const IndexKey& key) { return key.context == context; });
}

void IndexCache::DropChanged(ContextId context, int64_t opening, Layer layer, int64_t changes) {
  DropIf([&](const IndexKey& key) {
    return key.context == context && key.opening == opening && key.layer == layer &&
           key.changes < changes;
  });
}

IndexCache::Counters IndexCache::counters() const {
  absl::MutexLock lock(&mu_);
  return {.resident_bytes = used_bytes_, .loads = loads_, .evictions = evictions_};
}

}  // namespace carrel::kvstore
