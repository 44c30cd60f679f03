// What:    Export and Import of ContextService: a context's stream (kvstore/storage/context_stream.h)
//          in pieces. Disk and digests are worked on by the engine's background threads, a piece at a
//          time, so that searches do not wait for them.
// Ownership: a reactor deletes itself when its call is over.
#pragma once

#include <memory>

#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/engine/engine.h"

namespace carrel::kvstore {

grpc::ServerWriteReactor<v1::ExportPiece>* StartExport(Engine* engine, const std::string& name);
grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* StartImport(Engine* engine);

}  // namespace carrel::kvstore
