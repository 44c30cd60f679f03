#include "kvstore/storage/catalog.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "common/status.h"
#include "kvstore/format/little_endian.h"
#include "rocksdb/convenience.h"
#include "rocksdb/metadata.h"

namespace carrel::kvstore {
namespace {

std::string CounterKey() { return std::string(8, '\0') + "next_context_id"; }

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

CatalogEntry Unreadable(ContextId id, absl::StatusCode code, absl::string_view why) {
  const std::string name = absl::StrCat("#", id.value());
  return {.id = id,
          .name = name,
          .manifest = absl::Status(code, absl::StrCat("context ", name, ": manifest: ", why))};
}

CatalogEntry ReadCatalogEntry(const OpenDb& db, ContextId id) {
  const auto payload = ReadEntry(db, ManifestKey(id));
  if (!payload.ok()) return Unreadable(id, payload.status().code(), payload.status().message());
  if (!payload->has_value()) return Unreadable(id, absl::StatusCode::kDataLoss, "missing");
  v1::Manifest manifest;
  if ((*payload)->empty()) {
    return {.id = id, .name = absl::StrCat("#", id.value()), .hidden = true, .manifest = manifest};
  }
  if (!manifest.ParseFromString(**payload)) {
    return Unreadable(id, absl::StatusCode::kDataLoss, "is no Manifest message");
  }
  std::string name = manifest.name();
  if (manifest.format_version() < kOldestManifestFormatVersion ||
      manifest.format_version() > kManifestFormatVersion) {
    return {.id = id,
            .name = name,
            .manifest = absl::FailedPreconditionError(
                absl::StrCat("context ", name, " has format version ", manifest.format_version(),
                             ", this program reads versions ", kOldestManifestFormatVersion, " to ",
                             kManifestFormatVersion))};
  }
  if (manifest.context_id() != id.value()) {
    return Unreadable(id, absl::StatusCode::kDataLoss,
                      absl::StrCat("is that of context id ", manifest.context_id()));
  }
  return {.id = id, .name = std::move(name), .manifest = std::move(manifest)};
}

}  // namespace

std::string ManifestKey(ContextId id) {
  return EncodeKey({.context = id, .layer = -1, .kind = Kind::kManifest});
}

absl::StatusOr<std::string> EncodeManifest(const v1::Manifest& manifest) {
  const std::string& name = manifest.name();
  if (name.empty() || static_cast<int64_t>(name.size()) > kMaxContextNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("context name of ", name.size(),
                                                   " bytes, must be 1 .. ", kMaxContextNameBytes));
  }
  if (name[0] == '#' || std::any_of(name.begin(), name.end(), [](char c) {
        return static_cast<uint8_t>(c) < 0x20 || c == 0x7f;
      })) {
    return absl::InvalidArgumentError(
        absl::StrCat("context name \"", absl::CHexEscape(name),
                     "\" must not begin with # or hold control characters"));
  }
  if (manifest.format_version() != kManifestFormatVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: format_version=", manifest.format_version(), ", must be ",
                     kManifestFormatVersion));
  }
  std::string payload;
  if (!manifest.SerializeToString(&payload)) {
    return absl::InvalidArgumentError("manifest: a string is not UTF-8, or it is over 2 GiB");
  }
  // Parsing refuses what serialising let through (strings that are not UTF-8).
  if (!v1::Manifest().ParseFromString(payload)) {
    return absl::InvalidArgumentError("manifest: a string is not UTF-8");
  }
  return EncodeSegment(ManifestKey(ContextId(manifest.context_id())), payload, kDTypeBytes);
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

absl::StatusOr<std::vector<CatalogEntry>> ReadCatalog(const OpenDb& db) {
  ASSIGN_OR_RETURN(const std::vector<ContextId> ids, ContextsWithFiles(db));
  std::vector<CatalogEntry> entries;
  for (const ContextId id : ids) entries.push_back(ReadCatalogEntry(db, id));
  return entries;
}

absl::StatusOr<uint64_t> ReadNextContextId(const OpenDb& db) {
  auto payload = ReadEntry(db, CounterKey());
  if (!payload.ok()) return Annotate(payload.status(), "counter of context ids");
  uint64_t next = 1;
  if (payload->has_value()) {
    if ((**payload).size() != 8) {
      return absl::DataLossError(
          absl::StrCat("counter of context ids has ", (**payload).size(), " bytes, must be 8"));
    }
    next = LoadLittleEndian<uint64_t>((**payload).data());
  }
  // The counter is a record of the write-ahead log; files outlive a damaged log.
  ASSIGN_OR_RETURN(const std::vector<ContextId> ids, ContextsWithFiles(db));
  if (!ids.empty()) next = std::max(next, ids.back().value() + 1);
  return next;
}

absl::Status WriteNextContextId(OpenDb& db, uint64_t next) {
  std::string payload;
  AppendLittleEndian(payload, next);
  const std::string key = CounterKey();
  rocksdb::WriteOptions durable;
  durable.sync = true;
  return FromRocks(db.db->Put(durable, db.catalog, key, EncodeSegment(key, payload, kDTypeBytes)),
                   absl::StrCat("store ", db.folder, ": counter of context ids"));
}

absl::Status HideContext(OpenDb& db, const CatalogEntry& entry) {
  const std::string key = ManifestKey(entry.id);
  rocksdb::WriteOptions durable;
  durable.sync = true;
  return FromRocks(db.db->Put(durable, db.catalog, key, EncodeSegment(key, "", kDTypeBytes)),
                   absl::StrCat("store ", db.folder, ": deleting context ", entry.name));
}

absl::Status FreeContext(OpenDb& db, const CatalogEntry& entry) {
  const auto [begin, end] = ContextKeyRange(entry.id);
  const rocksdb::Slice from = ToSlice(begin), to = ToSlice(end);
  const std::string what = absl::StrCat("store ", db.folder, ": freeing context ", entry.name);
  RETURN_IF_ERROR(FromRocks(
      rocksdb::DeleteFilesInRange(db.db.get(), db.segments, &from, &to, /*include_end=*/false),
      what));
  // Without files nobody asks for the mark any more; whether this survives a crash is indifferent.
  return FromRocks(db.db->Delete(rocksdb::WriteOptions(), db.catalog, ManifestKey(entry.id)), what);
}

}  // namespace carrel::kvstore
