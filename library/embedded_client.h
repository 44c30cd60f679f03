// What:      a StoreClient of a store in this process: requests go to an engine's session as they
//            are, and replies are made of the engine's pieces. No message is serialised, nothing
//            travels, and where the client waits it works: an answer that no thread has begun is
//            made on the waiting one (decision 052). Requests are converted, limited, charged and
//            counted as a server's are; parts, errors and their order are those of the wire. A query
//            that a decoder waits for needs no message at all (Attend).
// Errors:    as StoreClient's. A session whose Open was refused, whose first request was another, or
//            that was sent more than a request of its context may hold has ended.
// Ownership: the engine, and the pool if there is one, outlive the client.
// Threads:   as StoreClient.
#pragma once

#include <memory>

#include "common/thread_pool.h"
#include "decoder/client/store_client.h"

namespace carrel::kvstore {
class Engine;
}

namespace carrel::library {

// pool: of a caller that waits for each answer before it goes on, as a decoder does. Its queries are answered
//       when they are waited for, by the thread that waits and this pool; only what is asked ahead
//       (speculative queries, rows) is left to the engine's threads.
//       Null: all is left to the engine's threads, so that many requests are answered at a time.
std::unique_ptr<decoder::StoreClient> MakeEmbeddedClient(kvstore::Engine* engine, ThreadPool* pool);

}  // namespace carrel::library
