#include "kvstore/storage/catalog.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "rocksdb/convenience.h"
#include "rocksdb/metadata.h"

namespace carrel::kvstore {
namespace {

rocksdb::Slice ToSlice(absl::string_view bytes) { return {bytes.data(), bytes.size()}; }

// The payload stored under a key of the catalog; nullopt if there is none.
absl::StatusOr<std::optional<std::string>> ReadEntry(const OpenDb& db, const std::string& key) {
  std::string value;
  rocksdb::ReadOptions options;
  options.verify_checksums = true;
  const rocksdb::Status status = db.db->Get(options, db.catalog, key, &value);
  if (status.IsNotFound()) return std::nullopt;
  RETURN_IF_ERROR(FromRocks(status, "catalog"));
  ASSIGN_OR_RETURN(const std::unique_ptr<SegmentView> view, SegmentView::Open(key, value));
  const absl::string_view payload = view->payload();
  RETURN_IF_ERROR(view->Verify(0, static_cast<int64_t>(payload.size())));
  return std::string(payload);
}

std::string NumberSign(ContextId id) { return absl::StrCat("#", id.ToString()); }

CatalogEntry Unreadable(ContextId id, absl::StatusCode code, absl::string_view why) {
  const std::string name = NumberSign(id);
  return {.id = id,
          .name = name,
          .manifest = absl::Status(code, absl::StrCat("context ", name, ": manifest: ", why))};
}

// The manifest of a catalog entry's payload, with its name and content id.
absl::StatusOr<v1::Manifest> ParseManifest(ContextId id, const std::string& payload) {
  v1::Manifest manifest;
  if (id.is_number()) {
    if (!manifest.ParseFromString(payload)) return absl::DataLossError("is no Manifest message");
    manifest.clear_content_id();
    return manifest;
  }
  v1::CatalogRecord record;
  if (!record.ParseFromString(payload) || !manifest.ParseFromString(record.manifest())) {
    return absl::DataLossError("is no CatalogRecord message");
  }
  manifest.set_name(record.name());
  manifest.set_content_id(Sha256Hex(record.manifest()));
  return manifest;
}

absl::Status CheckEntry(ContextId id, const v1::Manifest& manifest) {
  const bool bound = manifest.format_version() > kUnboundManifestFormatVersion;
  ASSIGN_OR_RETURN(const ContextId found, ContextIdOf(manifest));
  if (found != id || bound == id.is_number()) {
    return absl::DataLossError(absl::StrCat("is that of context id ", found.ToString()));
  }
  RETURN_IF_ERROR(CheckManifest(manifest));
  return SegmentDigests::Of(manifest).status();
}

// Which of two contexts of one name is meant, nobody knows: neither can be read by it.
void RefuseSharedNames(std::vector<CatalogEntry>& entries) {
  absl::flat_hash_map<std::string, std::vector<CatalogEntry*>> by_name;
  for (CatalogEntry& entry : entries) {
    if (!entry.hidden) by_name[entry.name].push_back(&entry);
  }
  for (const auto& [name, sharing] : by_name) {
    if (sharing.size() == 1) continue;
    for (CatalogEntry* entry : sharing) {
      entry->name = NumberSign(entry->id);
      entry->manifest = absl::DataLossError(absl::StrCat(
          "context ", entry->name, ": manifest: ", sharing.size(), " contexts have the name ", name,
          "; carrel rm \"", entry->name, "\" removes this one"));
    }
  }
}

}  // namespace

std::string ManifestKey(ContextId id) {
  return EncodeKey({.context = id, .layer = -1, .kind = Kind::kManifest});
}

absl::StatusOr<std::string> EncodeManifest(const v1::Manifest& manifest) {
  RETURN_IF_ERROR(ValidateContextName(manifest.name()));
  if (manifest.format_version() != kManifestFormatVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: format_version=", manifest.format_version(), ", must be ",
                     kManifestFormatVersion));
  }
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
  if (const absl::Status fits = CheckManifest(manifest); !fits.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("manifest: ", fits.message()));
  }
  v1::Manifest nameless = manifest;
  nameless.clear_name();
  nameless.clear_content_id();
  std::string bytes;
  if (!nameless.SerializeToString(&bytes)) {
    return absl::InvalidArgumentError("manifest: a string is not UTF-8, or it is over 2 GiB");
  }
  // Parsing refuses what serialising let through (strings that are not UTF-8).
  if (!v1::Manifest().ParseFromString(bytes)) {
    return absl::InvalidArgumentError("manifest: a string is not UTF-8");
  }
  return EncodeRecord(id, manifest.name(), bytes);
}

std::string EncodeRecord(ContextId id, const std::string& name, const std::string& manifest) {
  v1::CatalogRecord record;
  record.set_name(name);
  record.set_manifest(manifest);
  return EncodeSegment(ManifestKey(id), record.SerializeAsString(), kDTypeBytes);
}

absl::Status CheckImported(const v1::Manifest& manifest) {
  RETURN_IF_ERROR(ValidateContextName(manifest.name()));
  if (manifest.format_version() != kManifestFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", manifest.name(), " has format version ", manifest.format_version(),
                     ", this program imports version ", kManifestFormatVersion));
  }
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
  return Annotate(CheckEntry(id, manifest), absl::StrCat("context ", manifest.name()));
}

absl::StatusOr<std::string> ReadManifestBytes(const OpenDb& db, ContextId id) {
  ASSIGN_OR_RETURN(const std::optional<std::string> payload, ReadEntry(db, ManifestKey(id)));
  v1::CatalogRecord record;
  if (id.is_number() || !payload.has_value() || !record.ParseFromString(*payload)) {
    return absl::DataLossError(absl::StrCat("context #", id.ToString(), ": no CatalogRecord"));
  }
  return record.manifest();
}

absl::StatusOr<std::vector<ContextId>> ContextsWithFiles(const OpenDb& db) {
  rocksdb::ColumnFamilyMetaData family;
  db.db->GetColumnFamilyMetaData(db.segments, &family);
  std::vector<ContextId> ids;
  for (const rocksdb::LevelMetaData& level : family.levels) {
    for (const rocksdb::SstFileMetaData& file : level.files) {
      const auto id = ContextOfKey(file.smallestkey);
      if (!id.ok()) {
        return Annotate(id.status(), absl::StrCat("store ", db.folder, ": file ", file.name));
      }
      ids.push_back(*id);
    }
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

CatalogEntry ReadCatalogEntry(const OpenDb& db, ContextId id) {
  const auto payload = ReadEntry(db, ManifestKey(id));
  if (!payload.ok()) return Unreadable(id, payload.status().code(), payload.status().message());
  if (!payload->has_value()) return Unreadable(id, absl::StatusCode::kDataLoss, "missing");
  if ((*payload)->empty()) {
    return {.id = id, .name = NumberSign(id), .hidden = true, .manifest = v1::Manifest()};
  }
  absl::StatusOr<v1::Manifest> manifest = ParseManifest(id, **payload);
  absl::Status status = manifest.status();
  if (status.ok()) status = ValidateContextName(manifest->name());
  if (!status.ok()) return Unreadable(id, absl::StatusCode::kDataLoss, status.message());
  std::string name = manifest->name();
  if (manifest->format_version() < kOldestManifestFormatVersion ||
      manifest->format_version() > kManifestFormatVersion) {
    return {.id = id,
            .name = name,
            .manifest = absl::FailedPreconditionError(
                absl::StrCat("context ", name, " has format version ", manifest->format_version(),
                             ", this program reads versions ", kOldestManifestFormatVersion, " to ",
                             kManifestFormatVersion))};
  }
  if (const absl::Status fits = CheckEntry(id, *manifest); !fits.ok()) {
    return Unreadable(id, absl::StatusCode::kDataLoss, fits.message());
  }
  return {.id = id, .name = std::move(name), .manifest = *std::move(manifest)};
}

absl::StatusOr<std::vector<CatalogEntry>> ReadCatalog(const OpenDb& db) {
  ASSIGN_OR_RETURN(const std::vector<ContextId> ids, ContextsWithFiles(db));
  std::vector<CatalogEntry> entries;
  for (const ContextId id : ids) {
    entries.push_back(ReadCatalogEntry(db, id));
    // What this process lacks is no fault of the context's.
    const absl::Status& status = entries.back().manifest.status();
    if (absl::IsResourceExhausted(status)) return status;
  }
  RefuseSharedNames(entries);
  return entries;
}

std::string HiddenMark(ContextId id) { return EncodeSegment(ManifestKey(id), "", kDTypeBytes); }

absl::Status HideContext(OpenDb& db, const CatalogEntry& entry) {
  rocksdb::WriteOptions durable;
  durable.sync = true;
  return FromRocks(db.db->Put(durable, db.catalog, ManifestKey(entry.id), HiddenMark(entry.id)),
                   absl::StrCat("store ", db.folder, ": deleting context ", entry.name));
}

absl::Status FreeContext(OpenDb& db, const CatalogEntry& entry) {
  const auto [begin, end] = ContextKeyRange(entry.id);
  const rocksdb::Slice from = ToSlice(begin), to = ToSlice(end);
  const std::string what = absl::StrCat("store ", db.folder, ": freeing context ", entry.name);
  RETURN_IF_ERROR(FromRocks(
      rocksdb::DeleteFilesInRange(db.db.get(), db.segments, &from, &to, /*include_end=*/false),
      what));
  // The record has a file of its own, which nothing else would ever free: so little is deleted that
  // RocksDB sees no reason to. Without files of segments nobody asks for it, nor for the mark any
  // more; whether these two survive a crash is indifferent.
  const std::string key = ManifestKey(entry.id);
  const rocksdb::Slice record = key;
  RETURN_IF_ERROR(FromRocks(
      rocksdb::DeleteFilesInRange(db.db.get(), db.catalog, &record, &record, /*include_end=*/true),
      what));
  return FromRocks(db.db->Delete(rocksdb::WriteOptions(), db.catalog, key), what);
}

CatalogNames::CatalogNames(const std::vector<CatalogEntry>& entries) {
  for (const CatalogEntry& entry : entries) {
    names_.emplace(entry.id, entry.name);
    if (entry.hidden) continue;
    ids_.emplace(entry.name, entry.id);
    // Of another format version the name is known all the same.
    complete_ =
        complete_ && (entry.manifest.ok() || absl::IsFailedPrecondition(entry.manifest.status()));
  }
}

std::optional<ContextId> CatalogNames::Find(const std::string& name) const {
  const auto found = ids_.find(name);
  return found == ids_.end() ? std::nullopt : std::optional<ContextId>(found->second);
}

const std::string* CatalogNames::NameOf(ContextId id) const {
  const auto found = names_.find(id);
  return found == names_.end() ? nullptr : &found->second;
}

void CatalogNames::Add(const std::string& name, ContextId id) {
  ids_.insert_or_assign(name, id);
  names_.insert_or_assign(id, name);
}

void CatalogNames::Remove(ContextId id) {
  const auto found = names_.find(id);
  if (found == names_.end()) return;
  ids_.erase(found->second);
  names_.erase(found);
}

}  // namespace carrel::kvstore
