// What:    calls of Warm, each of which lasts until a context is where its server reads it, as waits for a context
//          source (kvstore/engine/context_source.h). One thread hears of all: nobody waits for them.
// Errors:  of done: those of the server; Unavailable no server, it is gone, or this ends. A server without this call
//          (an older version): OK.
// Ownership: who starts a call keeps the handle. Destroying it, which may be after this has ended, cancels the call; a
//          callback that runs at that moment finishes.
// Threads: any. Callbacks run on this class's thread, which is there from the first call on; or on that of Start. The
//          destructor cancels what runs and waits for it: it must not run on this class's own thread.
// Source:  decision 110: gRPC's own threads for callbacks end with the last channel that has any.
#pragma once

#include <memory>
#include <string>

#include "kvstore/engine/context_source.h"

namespace grpc {
class Channel;
}

namespace carrel::kvstore {

class WarmCalls {
 public:
  WarmCalls();
  ~WarmCalls();

  // key: presented; empty: none.
  std::shared_ptr<void> Start(const std::shared_ptr<grpc::Channel>& channel, const std::string& key,
                              const std::string& name, ContextWaiter waiter);

 private:
  class Call;
  struct Queue;
  const std::unique_ptr<Queue> queue_;
};

}  // namespace carrel::kvstore
