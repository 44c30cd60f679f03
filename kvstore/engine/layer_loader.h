// What:    brings layers into memory behind the searches. A context's first searches read single
//          rows from disk (StoredContext::Expect(kSparse)); a layer of which an eighth was read so
//          is being used, and is loaded whole, in large pages, while the budget has room for it.
// Why:     decision 024.
// Ownership: the budget outlives it; contexts are shared.
// Threads: Touch any; one thread of its own loads.
// Cost:    Touch adds up two numbers per file of the layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/ids.h"

namespace carrel::kvstore {

class ResidentBudget;
class StoredContext;

class LayerLoader {
 public:
  explicit LayerLoader(const ResidentBudget* budget);
  // A layer that is being loaded is left as it is: a store that stops does not wait for its disk.
  ~LayerLoader();

  // The layer is being searched.
  void Touch(const std::shared_ptr<const StoredContext>& stored, Layer layer);

  int64_t loads() const;

 private:
  struct Wanted {
    std::shared_ptr<const StoredContext> stored;
    Layer layer;
  };
  void Run();

  const ResidentBudget* const budget_;
  mutable absl::Mutex mu_;
  std::deque<Wanted> wanted_ ABSL_GUARDED_BY(mu_);  // the first one is being loaded
  int64_t loads_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<bool> stopping_{false};  // set under mu_
  std::thread thread_;
};

}  // namespace carrel::kvstore
