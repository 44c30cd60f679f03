// What:   which contexts a database holds.
// Bytes:  the catalog family maps EncodeKey(manifest of context) to a segment whose payload is a
//         CatalogRecord message (under an id that is a number: a Manifest), or empty: deleted, files
//         not yet freed. Stores of format versions 1 and 2 also hold 8 zero bytes +
//         "next_context_id", which is not read any more.
// Threads: none of its own; the store serialises writers.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/format/context_id.h"
#include "kvstore/storage/rocks.h"

namespace carrel::kvstore {

std::string ManifestKey(ContextId id);

// The value under ManifestKey. InvalidArgument: a name that is none, another format version, a
// manifest that is out of bounds or too large.
absl::StatusOr<std::string> EncodeManifest(const v1::Manifest& manifest);

// The same of a manifest as it was serialized somewhere: its bytes stay as they are.
std::string EncodeRecord(ContextId id, const std::string& name, const std::string& manifest);
// Whether a manifest with a content id can be published: as EncodeManifest, but DataLoss if it is out
// of bounds, and FailedPrecondition if it is of another format version.
absl::Status CheckImported(const v1::Manifest& manifest);
// The manifest of a context as it is stored: what its content id is the SHA-256 of. DataLoss: there
// is none, or the context is unbound.
absl::StatusOr<std::string> ReadManifestBytes(const OpenDb& db, ContextId id);

// Contexts that have files, ascending: no file is read.
absl::StatusOr<std::vector<ContextId>> ContextsWithFiles(const OpenDb& db);

struct CatalogEntry {
  ContextId id;
  std::string name;     // "#ID" if the manifest is too damaged to tell, or the name is another's
  bool hidden = false;  // deleted
  // With its name and content id. DataLoss, or FailedPrecondition: another format version.
  // Messages begin with the name.
  absl::StatusOr<v1::Manifest> manifest;
};

// Of one context with files, read and checked as by ReadCatalog; whether another has its name is not looked at.
CatalogEntry ReadCatalogEntry(const OpenDb& db, ContextId id);

// Every context with files, by id. One without a manifest is damaged: files and manifest come in
// one atomic step, and go only after the manifest was marked.
absl::StatusOr<std::vector<CatalogEntry>> ReadCatalog(const OpenDb& db);

// What stands under the manifest's key of a deleted context.
std::string HiddenMark(ContextId id);
absl::Status HideContext(OpenDb& db, const CatalogEntry& entry);  // durable
// Frees the files of a hidden context and forgets it.
absl::Status FreeContext(OpenDb& db, const CatalogEntry& entry);

// Which name stands for which context, as of a reading of the whole catalog: who looks for one context reads its
// entry alone. It says nothing that an entry itself would not: whoever finds one reads it and compares the name.
// Threads: of its owner's. Cost: some hundred bytes per context.
class CatalogNames {
 public:
  // All of a catalog's (ReadCatalog).
  explicit CatalogNames(const std::vector<CatalogEntry>& entries);

  std::optional<ContextId> Find(const std::string& name) const;
  // Also of a deleted context whose files are not freed: "#ID". Null: there is none of this id.
  const std::string* NameOf(ContextId id) const;
  // Whether each context's name is known: a name that is not found is then nobody's.
  bool complete() const { return complete_; }

  void Add(const std::string& name, ContextId id);
  void Remove(ContextId id);

 private:
  std::map<std::string, ContextId> ids_;
  std::map<ContextId, std::string> names_;
  bool complete_ = true;
};

}  // namespace carrel::kvstore
