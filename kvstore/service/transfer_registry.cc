#include "kvstore/service/transfer_registry.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/engine/request_metrics.h"

namespace carrel::kvstore {

absl::Status TransferRegistry::Add(std::shared_ptr<Transfer> transfer) {
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(transfers_.size()) >= limits_.max_transfers) {
    CountRefusal("transfers");
    return absl::ResourceExhaustedError(absl::StrCat(
        transfers_.size(),
        " exports and imports are going on (max_transfers=", limits_.max_transfers, ")"));
  }
  const Transfer* const key = transfer.get();
  transfers_.emplace(key, std::move(transfer));
  return absl::OkStatus();
}

void TransferRegistry::Remove(const Transfer* transfer) {
  std::shared_ptr<Transfer> last;  // destroyed without the lock
  absl::MutexLock lock(&mu_);
  const auto it = transfers_.find(transfer);
  if (it == transfers_.end()) return;
  last = std::move(it->second);
  transfers_.erase(it);
}

void TransferRegistry::EndThoseThatAreOver() {
  std::vector<std::shared_ptr<Transfer>> all;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [key, transfer] : transfers_) all.push_back(transfer);
  }
  const auto now = std::chrono::steady_clock::now();
  for (const std::shared_ptr<Transfer>& transfer : all) transfer->EndIfOver(now, limits_);
}

int64_t TransferRegistry::size() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(transfers_.size());
}

}  // namespace carrel::kvstore
