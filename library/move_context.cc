#include "library/move_context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/service/context_client.h"
#include "kvstore/storage/store.h"
#include "library/store_access.h"

namespace carrel::library {

absl::StatusOr<v1::ImportReply> ImportContext(
    StoreAccess& into, const std::string& name,
    absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
    absl::FunctionRef<void(int64_t position, int64_t bytes)> progress) {
  if (into.store() == nullptr) {
    ASSIGN_OR_RETURN(const auto client, into.NewContextClient(name));
    return client->Import(name, source, progress);
  }
  ASSIGN_OR_RETURN(const auto import, into.store()->Import(name));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, kvstore::ImportFrom(source, *import, progress));
  v1::ImportReply reply;
  reply.set_position(import->position());
  reply.set_bytes(import->bytes());
  reply.set_name(manifest.name());
  reply.set_content_id(manifest.content_id());
  return reply;
}

absl::Status CheckNameIsFreeAt(kvstore::ContextClient& server, const std::string& name,
                               const std::string& content_id) {
  const absl::StatusOr<v1::Manifest> there = server.Get(name);
  if (absl::IsNotFound(there.status())) return server.AskImport(name);
  RETURN_IF_ERROR(there.status());
  if (!content_id.empty() && there->content_id() == content_id) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("the server has a context \"", name, "\" already; choose another name"));
}

absl::StatusOr<v1::ImportReply> MoveContext(kvstore::Store& from, const std::string& name,
                                            kvstore::ContextClient& to, Progress& progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextExport> stream, from.Export(name));
  const std::string& content_id = stream->manifest().content_id();
  absl::StatusOr<v1::ImportReply> moved;
  if (const absl::StatusOr<v1::Manifest> there = to.Get(name);
      there.ok() && there->content_id() == content_id) {
    v1::ImportReply before;  // by an earlier run, which was interrupted at its very end
    before.set_name(name);
    before.set_content_id(content_id);
    before.set_bytes(stream->bytes());
    moved = std::move(before);
  } else {
    int64_t at = 0;  // offset of `piece`
    absl::string_view piece;
    const auto source = [&](int64_t offset) -> absl::StatusOr<absl::string_view> {
      while (at + static_cast<int64_t>(piece.size()) <= offset) {
        at += static_cast<int64_t>(piece.size());
        ASSIGN_OR_RETURN(piece, stream->Next());
        if (piece.empty()) return piece;
      }
      return piece.substr(static_cast<size_t>(offset - at));
    };
    moved = to.Import(name, source, [&](int64_t position, int64_t bytes) {
      if (bytes > 0) progress.Update(static_cast<double>(position) / bytes, "sending");
    });
  }
  RETURN_IF_ERROR(moved.status());
  RETURN_IF_ERROR(from.Delete(name));
  return moved;
}

}  // namespace carrel::library
