// What:   requests that wait for contexts that come from elsewhere (library::StoreAccess::Bring): no thread and no
//         place among answers is held meanwhile, and at the end of this nobody waits any more.
// Errors: of done: those of the store's; Unavailable this ends.
// Threads: any. Callbacks are called on the store's threads, or on the caller's: they must not wait for long.
// Ownership: the store outlives it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "library/store_access.h"

namespace carrel::http_api {

class Brings {
 public:
  explicit Brings(library::StoreAccess* store);
  ~Brings();

  struct Waiter {
    bool later = false;  // as kvstore::ContextWaiter
    // About once a second; false: it waits no more, and is told nothing. Null: it waits.
    std::function<bool(const kvstore::ContextComes&)> progress;
    // hold: what came stays as long as it is kept.
    std::function<void(const absl::Status&, std::shared_ptr<void> hold)> done;
  };
  void Bring(const std::string& name, Waiter waiter);

  // The same for a context that is to be here already: what holds it, if it is.
  std::shared_ptr<void> HoldIfHere(const std::string& name);

 private:
  struct Shared;
  library::StoreAccess* const store_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace carrel::http_api
