// What:   a context of a folder becomes one of a server: prefill into a store that is being served.
// Errors: AlreadyExists the server has the name; as Store::Export and ContextClient::Import.
#pragma once

#include <string>

#include "absl/status/statusor.h"

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

// Before hours are spent: OK if the server has no context of the name and takes one in from this
// client, or has the one of this content id (of an earlier run that was interrupted at its very end).
absl::Status CheckNameIsFreeAt(kvstore::ContextClient& server, const std::string& name,
                               const std::string& content_id);

// Sends the context to the server, which publishes it, and deletes it from the folder. Interrupted,
// the same call goes on where it was.
absl::StatusOr<v1::ImportReply> MoveContext(kvstore::Store& from, const std::string& name,
                                            kvstore::ContextClient& to, Progress& progress);

}  // namespace carrel::library
