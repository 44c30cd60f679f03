// What:   contexts on their way: as a stream into a store, and out of a folder to a server (prefill into a store that is
//         being served).
// Errors: AlreadyExists the store has the name; as Store::Export, Store::Import and ContextClient::Import.
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
}
namespace carrel::kvstore {
class ContextClient;
class Store;
}  // namespace carrel::kvstore

namespace carrel::library {

class StoreAccess;

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
