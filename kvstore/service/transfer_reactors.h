// What:    Export and Import of ContextService: a context's stream (kvstore/storage/context_stream.h)
//          in pieces. Disk and digests are worked on by the engine's background threads, a piece at a
//          time, so that searches do not wait for them.
// Rights:  visit: who calls and may, or why he may not (then the call ends with that).
// Ownership: a reactor deletes itself when its call is over.
#pragma once

#include <memory>

#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/admission.h"

namespace carrel::kvstore {

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine, absl::StatusOr<Visit> visit);
grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(
    Engine* engine, absl::StatusOr<Visit> visit);

}  // namespace carrel::kvstore
