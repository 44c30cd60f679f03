#include "library/move_context.h"

#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/convert.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/store.h"
#include "library/store_access.h"

namespace carrel::library {

absl::StatusOr<v1::Manifest> ExportContext(
    StoreAccess& from, const std::string& name,
    absl::FunctionRef<absl::Status(absl::string_view piece, int64_t bytes)> sink) {
  if (from.store() == nullptr) {
    ASSIGN_OR_RETURN(const auto client, from.NewContextClient(name));
    ASSIGN_OR_RETURN(v1::Manifest manifest, client->Get(name));
    const int64_t about = 1 + kvstore::FactsOf(manifest).bytes;
    RETURN_IF_ERROR(
        client->Export(name, [&](absl::string_view piece) { return sink(piece, about); }));
    return manifest;
  }
  ASSIGN_OR_RETURN(const auto stream, from.store()->Export(name));
  constexpr size_t kPieceBytes = kvstore::kStreamPieceBytes;
  const auto send = [&](absl::string_view bytes) -> absl::Status {
    for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), kPieceBytes))) {
      RETURN_IF_ERROR(sink(bytes.substr(0, kPieceBytes), stream->bytes()));
    }
    return absl::OkStatus();
  };
  // Each file is verified while the one before it goes.
  const auto verified = [&](int64_t file) {
    return std::async(std::launch::async | std::launch::deferred, [&stream, file] {
      std::string sha256;
      const absl::Status status =
          CatchThrown("verification", [&] { return stream->VerifyFile(file, &sha256); });
      return std::make_pair(status, absl::HexStringToBytes(sha256));
    });
  };
  std::future<std::pair<absl::Status, std::string>> next;
  if (stream->files() > 0) next = verified(0);
  RETURN_IF_ERROR(send(stream->header().Encode()));
  for (int64_t file = 0; file < stream->files(); ++file) {
    const auto [status, digest] = next.get();
    RETURN_IF_ERROR(status);
    if (file + 1 < stream->files()) next = verified(file + 1);
    RETURN_IF_ERROR(send(stream->File(file)));
    RETURN_IF_ERROR(send(digest));
  }
  return stream->manifest();
}

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
