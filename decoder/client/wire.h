// What:   what a session asks and is told as messages of proto/carrel/v1/retrieval.proto, on the decoder's
//         side; with store_client_grpc.h all of decoder/ that knows them.
// Errors: DataLoss a reply whose tensor has another dtype, rank or size than its context implies
//         (names it): never used, never guessed.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "retrieval/opened.h"
#include "retrieval/query.h"
#include "retrieval/session.h"

namespace carrel::v1 {
class FetchRows;
class Manifest;
class Open;
class OpenReply;
class Query;
class SessionReply;
class Tensor;
}  // namespace carrel::v1

namespace carrel::decoder {

void ToWire(const retrieval::OpenRequest& open, v1::Open& wire);
void ToWire(const retrieval::Query& query, const AttentionShape& shape, v1::Query& wire);
void ToWire(const retrieval::Fetch& fetch, v1::FetchRows& wire);

retrieval::ContextFacts FactsOf(const v1::Manifest& manifest);
absl::StatusOr<retrieval::Opened> OpenedFromWire(const v1::OpenReply& wire);

// A part of a reply to `what`, of a context of this shape; rows stay where protobuf put them. An Error becomes its
// status.
absl::StatusOr<retrieval::Part> PartFromWire(v1::SessionReply wire, const AttentionShape& shape,
                                             absl::string_view what);

// Floats of this shape; -1 leaves a dimension open.
absl::Status CheckFloats(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                         absl::string_view what);

}  // namespace carrel::decoder
