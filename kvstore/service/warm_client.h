// What:    one call of ContextService.Warm, as a context source (kvstore/engine/context_source.h). No thread
//          waits.
// Errors:  of done: those of the server; Unavailable no server, or it is gone. A server without this call (an older
//          version): OK.
// Threads: any; callbacks run on gRPC's threads.
// Ownership: the caller keeps the handle. Destroying it cancels the call; a callback that runs at that moment
//          finishes.
#pragma once

#include <memory>
#include <string>

#include "kvstore/engine/context_source.h"

namespace grpc {
class Channel;
}

namespace carrel::kvstore {

// key: presented; empty: none.
std::shared_ptr<void> StartWarm(const std::shared_ptr<grpc::Channel>& channel,
                                const std::string& key, const std::string& name,
                                ContextWaiter waiter);

}  // namespace carrel::kvstore
