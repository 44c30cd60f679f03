// What:    one ContextService.Warm as who waits for a context has it (kvstore/engine/context_source.h): no thread
//          waits.
// Errors:  of done: what the server says; Unavailable no server, or it is gone. A server of an older version has what
//          it has: OK.
// Threads: any; what is told is told on gRPC's threads.
// Ownership: who waits keeps the handle; without it the call is cancelled, and nothing is told but what is being told
//          at that moment.
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
