// What:    where contexts come from that a store does not have yet: a bucket (kvstore/replica/residence.h). A server
//          without one has what its store has.
// Errors:  of done: NotFound there is no such context; Unavailable it is not known whether there is; others as the
//          source has them. OK: the store has it now, and keeps it while the handle is held.
// Threads: any. What is told is told on any thread, also on the caller's before Bring returns, one call at a time for
//          each who waits.
// Ownership: who waits keeps the handle that Bring returned; without it he is told nothing more, and what came for
//          him may go again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::kvstore {

// How far a context is that comes.
struct ContextComes {
  int64_t bytes = 0, of = 0;  // here, of how many; 0 of 0: it has not begun
  bool waits_for_room =
      false;  // what lies here is open, or awaited: it begins when one of those is closed
};

// The callbacks of one wait for a context. progress may be null.
struct ContextWaiter {
  // He opens it later, without his handle: what came for him is kept for a while, until somebody opens it. Who opens
  // it while he keeps the handle needs no more: it may go as soon as it is closed.
  bool later = false;
  std::function<void(const ContextComes&)> progress;  // about once a second
  std::function<void(const absl::Status&)> done;      // once
};

// A context that a source has.
struct SourceContext {
  std::string name, content_id;
  int64_t tokens = 0, bytes = 0;
  bool here = false;  // in the store, too
};

class ContextSource {
 public:
  virtual ~ContextSource() = default;
  virtual std::shared_ptr<void> Bring(const std::string& name, ContextWaiter waiter) = 0;
  // Every context that it has, by name, as it knew a few seconds ago.
  virtual std::vector<SourceContext> Contexts() const = 0;
  // What one is, which need not be here: it is not brought. NotFound; blocks.
  virtual absl::StatusOr<v1::Manifest> Describe(const std::string& name) = 0;
};

}  // namespace carrel::kvstore
