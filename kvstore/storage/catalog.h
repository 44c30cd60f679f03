// What:   which contexts a database holds: manifests, and the counter of context ids.
// Bytes:  the catalog family maps EncodeKey(manifest of context) to a segment whose payload is the
//         Manifest message, or empty: deleted, files not yet freed. And 8 zero bytes +
//         "next_context_id" to a segment of a u64.
// Threads: none of its own; the store serialises writers.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "carrel/v1/context.pb.h"
#include "common/ids.h"
#include "kvstore/storage/rocks.h"

namespace carrel::kvstore {

std::string ManifestKey(ContextId id);

// The value under ManifestKey. InvalidArgument if a field is missing or too long.
absl::StatusOr<std::string> EncodeManifest(const v1::Manifest& manifest);

// Contexts that have files, ascending: no file is read.
absl::StatusOr<std::vector<ContextId>> ContextsWithFiles(const OpenDb& db);

struct CatalogEntry {
  ContextId id;
  std::string name;     // "#ID" if the manifest is too damaged to tell
  bool hidden = false;  // deleted
  // DataLoss, or FailedPrecondition: another format version. Messages begin with the name.
  absl::StatusOr<v1::Manifest> manifest;
};

// Every context with files, by id. One without a manifest is damaged: files and manifest come in
// one atomic step, and go only after the manifest was marked.
absl::StatusOr<std::vector<CatalogEntry>> ReadCatalog(const OpenDb& db);

absl::StatusOr<uint64_t> ReadNextContextId(const OpenDb& db);  // 1 in a new store
absl::Status WriteNextContextId(OpenDb& db, uint64_t next);    // durable

absl::Status HideContext(OpenDb& db, const CatalogEntry& entry);  // durable
// Frees the files of a hidden context and forgets it.
absl::Status FreeContext(OpenDb& db, const CatalogEntry& entry);

}  // namespace carrel::kvstore
