#include "kvstore/engine/resident_budget.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <tuple>
#include <utility>

#include "kvstore/storage/store.h"

namespace carrel::kvstore {

ResidentBudget::ResidentBudget(int64_t budget_bytes, std::function<int64_t()> heap_bytes,
                               std::function<void(int64_t)> shed)
    : budget_bytes_(budget_bytes),
      heap_bytes_(std::move(heap_bytes)),
      shed_(std::move(shed)),
      statm_(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)) {}

ResidentBudget::~ResidentBudget() {
  if (statm_ >= 0) close(statm_);
}

ResidentBudget::Layers::Layers(ResidentBudget* budget, std::shared_ptr<const StoredContext> stored,
                               int32_t layers)
    : budget_(budget), stored_(std::move(stored)), touched_(static_cast<size_t>(layers)) {
  absl::MutexLock lock(&budget_->mu_);
  budget_->contexts_.push_back(this);
}

ResidentBudget::Layers::~Layers() {
  absl::MutexLock lock(&budget_->mu_);
  auto& contexts = budget_->contexts_;
  contexts.erase(std::remove(contexts.begin(), contexts.end(), this), contexts.end());
}

void ResidentBudget::Layers::Touch(int32_t layer) {
  touched_[static_cast<size_t>(layer)].store(1 + budget_->clock_.fetch_add(1),
                                             std::memory_order_relaxed);
}

std::pair<int64_t, int64_t> ResidentBudget::Read() const {
  static const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  char text[128];
  const ssize_t bytes = statm_ < 0 ? 0 : pread(statm_, text, sizeof(text) - 1, 0);
  if (bytes <= 0) return {0, 0};  // no such file here: the kernel alone bounds the pages
  text[bytes] = '\0';
  long long size = 0, resident = 0, of_files = 0;
  if (std::sscanf(text, "%lld %lld %lld", &size, &resident, &of_files) != 3) return {0, 0};
  return {resident * page_bytes, of_files * page_bytes};
}

void ResidentBudget::EnforceAtTimes() {
  constexpr std::chrono::nanoseconds kPause = std::chrono::milliseconds(1);
  const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
  if (now.count() < enforce_again_.load(std::memory_order_relaxed)) return;
  enforce_again_.store((now + kPause).count(), std::memory_order_relaxed);
  Enforce();
}

void ResidentBudget::Enforce() {
  if (HeldBytes() <= budget_bytes_ || !mu_.TryLock()) return;
  shed_(HeldBytes() - (budget_bytes_ - budget_bytes_ / 5));
  if (HeldBytes() <= budget_bytes_) return mu_.Unlock();
  std::vector<std::tuple<int64_t, Layers*, int32_t>> oldest;
  for (Layers* context : contexts_) {
    for (size_t layer = 0; layer < context->touched_.size(); ++layer) {
      const int64_t touched = context->touched_[layer].load(std::memory_order_relaxed);
      if (touched > 0) oldest.emplace_back(touched, context, static_cast<int32_t>(layer));
    }
  }
  std::sort(oldest.begin(), oldest.end());
  for (const auto& [touched, context, layer] : oldest) {
    if (HeldBytes() <= budget_bytes_ - budget_bytes_ / 10) break;
    int64_t expected = touched;
    context->touched_[static_cast<size_t>(layer)].compare_exchange_strong(expected, 0);
    context->stored_->ReleasePages(layer);
    releases_.fetch_add(1, std::memory_order_relaxed);
  }
  mu_.Unlock();
}

}  // namespace carrel::kvstore
