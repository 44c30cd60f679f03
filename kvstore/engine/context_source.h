// What:    where contexts come from that a store does not have yet: a bucket (kvstore/replica/residence.h). A server
//          without one has what its store has.
// Errors:  of done: NotFound there is no such context; Unavailable nobody says whether there is; others as the
//          source has them. OK: the store has it now, and keeps it long enough for it to be opened.
// Threads: any. What is told is told on any thread, also on the caller's before Bring returns, one call at a time for
//          each who waits.
// Ownership: who waits keeps the handle that Bring returned; without it he is told nothing more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace carrel::kvstore {

// Who waits for a context. progress may be null.
struct ContextWaiter {
  // About once a second: how many bytes of how many are here. 0 of 0: it has not begun.
  std::function<void(int64_t bytes, int64_t of)> progress;
  std::function<void(const absl::Status&)> done;  // once
};

class ContextSource {
 public:
  virtual ~ContextSource() = default;
  virtual std::shared_ptr<void> Bring(const std::string& name, ContextWaiter waiter) = 0;
};

}  // namespace carrel::kvstore
