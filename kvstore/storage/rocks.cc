#include "kvstore/storage/rocks.h"

#include <vector>

#include "absl/strings/match.h"
#include "common/resource_status.h"
#include "common/status.h"
#include "rocksdb/table.h"

namespace carrel::kvstore {
namespace {

constexpr char kCatalogFamily[] = "catalog";

rocksdb::ColumnFamilyOptions SegmentFamilyOptions() {
  rocksdb::ColumnFamilyOptions options;
  options.compression = rocksdb::kNoCompression;
  options.bottommost_compression = rocksdb::kDisableCompressionOption;
  options.disable_auto_compactions = true;  // files come in finished and leave whole
  rocksdb::BlockBasedTableOptions table;
  table.no_block_cache = true;  // the page cache is the cache
  table.block_size = 1;         // one value per block: sst_blocks.h
  table.block_restart_interval = 1;
  table.use_delta_encoding = false;
  table.block_align = false;
  // Values prove themselves; RocksDB's own blocks (index, properties) need a checksum, for it aborts
  // on damage in a block that it may trust. There is one kind for all blocks of a file, so it is the
  // fastest: Debian's CRC runs at 1 GB/s.
  table.checksum = rocksdb::kXXH3;
  table.format_version = 5;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

rocksdb::ColumnFamilyOptions CatalogFamilyOptions() {
  rocksdb::ColumnFamilyOptions options;
  options.compression = rocksdb::kNoCompression;
  options.bottommost_compression = rocksdb::kDisableCompressionOption;
  rocksdb::BlockBasedTableOptions table;
  table.no_block_cache = true;
  table.block_size = 1;  // damage to a block costs one manifest
  table.checksum = rocksdb::kCRC32c;
  table.format_version = 5;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

rocksdb::DBOptions DatabaseOptions(StoreMode mode) {
  rocksdb::DBOptions options;
  options.create_if_missing = mode == StoreMode::kReadWrite;
  options.create_missing_column_families = mode == StoreMode::kReadWrite;
  options.allow_mmap_reads = true;       // ingestion checks a file's ends without copying them
  options.advise_random_on_open = true;  // little is read through RocksDB, and not in order
  // RocksDB's least. Of a quarter of them it reads index and properties when it opens, which from a
  // cold disk takes longer than all else; only the catalog is read through it.
  options.max_open_files = 20;
  // A damaged file must not keep the whole store from opening: it is reported where it is read.
  options.paranoid_checks = false;
  options.skip_stats_update_on_db_open = true;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.keep_log_file_num = 2;
  options.max_log_file_size = 1 << 20;
  return options;
}

}  // namespace

absl::Status FromRocks(const rocksdb::Status& status, absl::string_view what) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = status.ToString();
  const std::string message = absl::StrCat(what, ": ", text);
  // What this process or machine lacks is told before damage: RocksDB wraps one in the other.
  if (status.IsNoSpace() || absl::StrContains(text, "No space left on device") ||
      absl::StrContains(text, "Disk quota exceeded") || absl::StrContains(text, "File too large")) {
    return MakeDiskFull(message);
  }
  if (absl::StrContains(text, "Too many open files")) return OutOfDescriptors(message);
  if (status.IsMemoryLimit()) return absl::ResourceExhaustedError(message);
  if (status.IsCorruption() || status.IsPathNotFound()) return absl::DataLossError(message);
  if (absl::StrContains(text, "Permission denied") ||
      absl::StrContains(text, "Read-only file system")) {
    return absl::PermissionDeniedError(message);
  }
  // A file that is gone, or one whose index leads beyond its end.
  if (status.IsIOError() && (absl::StrContains(text, "No such file or directory") ||
                             absl::StrContains(text, "larger than file length"))) {
    return absl::DataLossError(message);
  }
  if (status.IsInvalidArgument()) return absl::InvalidArgumentError(message);
  if (status.IsIOError() || status.IsTryAgain() || status.IsBusy()) {
    return absl::UnavailableError(message);
  }
  return absl::InternalError(message);
}

rocksdb::Options SegmentOptions() {
  return rocksdb::Options(DatabaseOptions(StoreMode::kReadOnly), SegmentFamilyOptions());
}

rocksdb::Options CatalogOptions() {
  return rocksdb::Options(DatabaseOptions(StoreMode::kReadOnly), CatalogFamilyOptions());
}

OpenDb::~OpenDb() {
  if (db == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* handle : {segments, catalog}) {
    if (handle != nullptr) db->DestroyColumnFamilyHandle(handle).PermitUncheckedError();
  }
}

absl::StatusOr<std::unique_ptr<OpenDb>> OpenRocks(const std::string& folder, StoreMode mode) {
  const std::string path = folder + "/db";
  const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
      {rocksdb::kDefaultColumnFamilyName, SegmentFamilyOptions()},
      {kCatalogFamily, CatalogFamilyOptions()}};
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      mode == StoreMode::kReadWrite
          ? rocksdb::DB::Open(DatabaseOptions(mode), path, families, &handles, &db)
          : rocksdb::DB::OpenForReadOnly(DatabaseOptions(mode), path, families, &handles, &db);
  if (!status.ok()) {
    const std::string text = status.ToString();
    if (absl::StrContains(text, "While lock file") ||
        absl::StrContains(text, "lock hold by current process")) {
      return absl::FailedPreconditionError(absl::StrCat(
          "store ", folder, " is locked by ",
          absl::StrContains(text, "current process") ? "this process already" : "another process"));
    }
    if (status.IsInvalidArgument()) {  // unknown or missing column families
      return absl::FailedPreconditionError(
          absl::StrCat(path, " is a database, but not a store: ", text));
    }
    return FromRocks(status, absl::StrCat("store ", folder));
  }
  auto open = std::make_unique<OpenDb>();
  open->folder = folder;
  open->db.reset(db);
  open->segments = handles[0];
  open->catalog = handles[1];
  return open;
}

}  // namespace carrel::kvstore
