// What:   contexts on their way: as a stream out of a store and into one, and out of a folder to a server (prefill into a
//         store that is being served).
// Errors: AlreadyExists the store has the name; as Store::Export, Store::Import, ContextClient::Export and Import.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel {
class Progress;
}
namespace carrel::v1 {
class ImportReply;
class Manifest;
}  // namespace carrel::v1
namespace carrel::kvstore {
class ContextClient;
class Store;
}  // namespace carrel::kvstore

namespace carrel::library {

class StoreAccess;

// Gives all of a context's stream, piece by piece, without a service in between where the store is a folder's. What
// `sink` returns ends it. bytes: of the whole stream; about, out of a server.
absl::StatusOr<v1::Manifest> ExportContext(
    StoreAccess& from, const std::string& name,
    absl::FunctionRef<absl::Status(absl::string_view piece, int64_t bytes)> sink);

// Takes all of a stream into the store, without a service in between where it is a folder's. As ContextClient::Import.
absl::StatusOr<v1::ImportReply> ImportContext(
    StoreAccess& into, const std::string& name,
    absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
    absl::FunctionRef<void(int64_t position, int64_t bytes)> progress);

// Before hours are spent: OK if the server has no context of the name and takes one in from this
// client, or has the one of this content id (of an earlier run that was interrupted at its very end).
absl::Status CheckNameIsFreeAt(kvstore::ContextClient& server, const std::string& name,
                               const std::string& content_id);

// Sends the context to the server, which publishes it, and deletes it from the folder. Interrupted,
// the same call goes on where it was.
absl::StatusOr<v1::ImportReply> MoveContext(kvstore::Store& from, const std::string& name,
                                            kvstore::ContextClient& to, Progress& progress);

}  // namespace carrel::library
