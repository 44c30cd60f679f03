// What:   which contexts a database holds: manifests, and the counter of context ids.
// Bytes:  the catalog family maps EncodeKey(manifest of context) to a segment whose payload is the
//         Manifest message, and 8 zero bytes + "next_context_id" to a segment of a u64.
// Threads: none of its own; the store serialises writers.
#pragma once

#include <optional>
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

// Contexts that have files, ascending, with or without a manifest: no file is read.
absl::StatusOr<std::vector<ContextId>> ContextsWithFiles(const OpenDb& db);

struct CatalogEntry {
  ContextId id;
  std::string name;  // "#ID" if the manifest is too damaged to tell
  // DataLoss, or FailedPrecondition: another format version. Messages begin with the name.
  absl::StatusOr<v1::Manifest> manifest;
};

// nullopt: the context has no manifest, so it is not published.
std::optional<CatalogEntry> ReadCatalogEntry(const OpenDb& db, ContextId id);
// Every published context, by id.
absl::StatusOr<std::vector<CatalogEntry>> ReadCatalog(const OpenDb& db);

absl::StatusOr<uint64_t> ReadNextContextId(const OpenDb& db);  // 1 in a new store
absl::Status WriteNextContextId(OpenDb& db, uint64_t next);    // durable

// Frees the files of a context. What iterators hold stays until they go.
absl::Status FreeFiles(OpenDb& db, ContextId id);

}  // namespace carrel::kvstore
