// What:   what the files of this folder share about RocksDB: options, status, an open database.
//         Included only by kvstore/storage/*.cc.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/storage/store.h"
#include "rocksdb/db.h"
#include "rocksdb/options.h"
#include "rocksdb/status.h"

namespace carrel::kvstore {

// "what: RocksDB's message" with our code. Damage and missing files are DataLoss.
absl::Status FromRocks(const rocksdb::Status& status, absl::string_view what);

// Options of the files that hold segments: uncompressed, a block per value, as sst_blocks.h reads
// them.
rocksdb::Options SegmentOptions();
// Of the file that brings a manifest.
rocksdb::Options CatalogOptions();

// An open database of two column families.
//   segments: only ingested files, each of one context, all on the lowest level; no writes, no
//             compaction. RocksDB names and keeps them; their values are read by SegmentFile.
//   catalog:  the manifest of each published context, and the counter of context ids.
struct OpenDb {
  ~OpenDb();
  std::string folder;  // the store's: for messages
  std::unique_ptr<rocksdb::DB> db;
  rocksdb::ColumnFamilyHandle* segments = nullptr;
  rocksdb::ColumnFamilyHandle* catalog = nullptr;
};
absl::StatusOr<std::unique_ptr<OpenDb>> OpenRocks(const std::string& folder, StoreMode mode);

}  // namespace carrel::kvstore
