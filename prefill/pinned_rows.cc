#include "prefill/pinned_rows.h"

#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/cuda/buffer.h"
#include "common/status.h"

namespace carrel::prefill {

struct PinnedRows::Places {
  std::vector<cuda::PinnedBuffer<uint8_t>> memory;
  absl::Mutex mu;
  std::vector<void*> free ABSL_GUARDED_BY(mu);
};

absl::StatusOr<std::unique_ptr<PinnedRows>> PinnedRows::Create(int layers, int64_t layer_bytes) {
  CARREL_CHECK(layers >= 1);
  auto places = std::make_shared<Places>();
  for (int i = 0; i < layers; ++i) {
    ASSIGN_OR_RETURN(auto memory, cuda::PinnedBuffer<uint8_t>::Create(layer_bytes));
    absl::MutexLock lock(&places->mu);
    places->free.push_back(memory.data());
    places->memory.push_back(std::move(memory));
  }
  return std::unique_ptr<PinnedRows>(new PinnedRows(std::move(places)));
}

std::shared_ptr<void> PinnedRows::Take() {
  absl::MutexLock lock(&places_->mu);
  places_->mu.Await(absl::Condition(
      +[](Places* p) ABSL_NO_THREAD_SAFETY_ANALYSIS { return !p->free.empty(); }, places_.get()));
  void* const place = places_->free.back();
  places_->free.pop_back();
  return std::shared_ptr<void>(place, [places = places_](void* given_back) {
    absl::MutexLock relock(&places->mu);
    places->free.push_back(given_back);
  });
}

}  // namespace carrel::prefill
