// What:    Export and Import of ContextService: a context's stream (kvstore/storage/context_stream.h)
//          in pieces. Disk and digests are worked on by the engine's background threads, a piece at a
//          time, so that searches do not wait for them.
// Rights:  visit: the caller's rights, or why it has none (then the call ends with that). Asked again for
//          each piece and every second (PermissionDenied). A transfer takes a place among the sessions
//          of its key and tenant, and its bytes count against their rates: beyond them the next piece
//          comes later. An import has a place in its tenant's quotas from its header on, and is held
//          against what the tenant has stored again as it arrives.
// Ownership: engine and registry outlive it; a reactor lives until gRPC and the engine are done with it.
#pragma once

#include <memory>

#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/transfer_registry.h"

namespace carrel::kvstore {

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine, TransferRegistry* registry,
                                                       grpc::CallbackServerContext* context,
                                                       absl::StatusOr<Visit> visit);
grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(
    Engine* engine, TransferRegistry* registry, grpc::CallbackServerContext* context,
    absl::StatusOr<Visit> visit);

}  // namespace carrel::kvstore
