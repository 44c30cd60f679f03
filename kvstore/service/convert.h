// What:   the only place where wire messages and the engine's types meet, and what gRPC knows of a caller.
// Errors: InvalidArgument names the field, what it is and what was expected.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/open_context.h"
#include "kvstore/engine/reply.h"
#include "kvstore/engine/request.h"
#include "kvstore/engine/session.h"

namespace grpc {
class ServerContextBase;
class Status;
}  // namespace grpc
namespace carrel::v1 {
class FetchRows;
class ListResponse_Summary;
class Manifest;
class Open;
class Query;
class SessionReply;
}  // namespace carrel::v1

namespace carrel::kvstore {

// Bytes of the largest request that makes sense for the context: as many queries as it may hold, and
// all of its rows named as held, or as many ids as one FetchRows may name.
int64_t MostRequestBytes(const OpenContext& context, const EngineConfig& config);

absl::StatusOr<OpenRequest> FromWire(const v1::Open& open);
absl::StatusOr<QueryRequest> FromWire(const v1::Query& query, const OpenContext& context);
absl::StatusOr<FetchRequest> FromWire(const v1::FetchRows& fetch, const OpenContext& context);

// Each sets the whole reply but for its request_id.
void OpenReplyToWire(const Session& session, const EngineConfig& config, v1::SessionReply* wire);
void ErrorToWire(const absl::Status& status, v1::SessionReply* wire);
// The next part of reply, of about max_bytes.
absl::Status NextPartToWire(Reply& reply, int64_t max_bytes, v1::SessionReply* wire);

ContextFacts FactsOf(const v1::Manifest& manifest);

void SummaryToWire(const v1::Manifest& manifest, v1::ListResponse_Summary* wire);

grpc::Status ToGrpc(const absl::Status& status);

// A key in "authorization: Bearer KEY", the names of a client certificate, the user at the other end of a Unix
// socket. Admission (kvstore/access) finds the principal.
Caller CallerOf(const grpc::ServerContextBase& context);

}  // namespace carrel::kvstore
