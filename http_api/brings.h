// What:   requests that wait for a context from elsewhere (library::StoreAccess::Bring), without holding a thread or a
//         place among answers. End ends all waits.
// Errors: of done: those of the store; Unavailable it has ended.
// Threads: any. Callbacks run on the store's threads, or on the caller's: they must not wait for long.
// Ownership: the store outlives it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "library/store_access.h"

namespace carrel::http_api {

class Brings {
 public:
  explicit Brings(library::StoreAccess* store);
  ~Brings() { End(); }
  // Who comes later is told at once.
  void End();

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
