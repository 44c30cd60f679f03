// What:    one ContextService.Warm on the server: its client is told how far the context is, and at last that it is
//          here.
// Ownership: engine and source outlive it; the call's context is gRPC's, until OnDone.
// Threads: gRPC's, the source's and the engine's; nothing here blocks.
// Edge:    it takes a session's place of the key and the tenant for as long as it waits. A key that is withdrawn ends
//          it with the next word about the context.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "absl/status/statusor.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/context_source.h"
#include "kvstore/engine/engine.h"

namespace carrel::kvstore {

// source: null: what the store has is here, and nothing else. The reactor owns itself until gRPC is done with it.
grpc::ServerWriteReactor<v1::WarmReply>* StartWarm(Engine* engine, ContextSource* source,
                                                   grpc::CallbackServerContext* context,
                                                   absl::StatusOr<Visit> visit);

}  // namespace carrel::kvstore
