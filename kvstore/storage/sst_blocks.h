// What:   where the values of an SST file lie, found without RocksDB: SstWriter's options make
//         every value a data block of its own with fixed framing, so a bounds-checked walk finds
//         them. RocksDB's own readers verify a block as a whole (64 MiB to find one row) or, told
//         not to, parse it unchecked and abort on a flipped bit.
// Bytes:  data blocks from offset 0, each:
//           shared bytes 0x00 | key bytes + 8 u8 | value bytes varint32 | key (25, or 17) |
//           sequence 0 and type "value" u64 = 1 | value | restart offset u32 = 0 |
//           restarts u32 = 1 | compression 0x00 | RocksDB's CRC u32 (not read: values prove
//           themselves).
//         The first and the last block are fences: an empty value under the bytes beside the first
//         and last key. RocksDB reads and checks the first and last value of a file when it is
//         published, and those of a layer's rows are of megabytes. Files without fences are read
//         as well.
// Source: RocksDB 7.8, block-based table format 5 (table/block_based).
// Errors: what is found before a deviation is right; from there on DataLoss with the offset.
// Cost:   touches one or two pages per value. Values of one size follow each other: from the second
//         on, those to come are asked for ahead (MappedFile::AskAhead), else each would wait for
//         the disk.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel::kvstore {

struct SstEntry {
  absl::string_view key;  // both views into the file
  absl::string_view value;
};

struct SstEntries {
  std::vector<SstEntry> entries;          // keys ascend; without fences
  absl::string_view first_key, last_key;  // of the blocks that were read, with fences
  absl::Status status;  // why the walk ended early; OK if it ended where it should
};

// Walks until the block of last_key has been read, the end that RocksDB's manifest knows.
SstEntries WalkToKey(absl::string_view file, absl::string_view last_key);
// Walks until offset data_bytes, the end that the file's own (verified) properties know.
SstEntries WalkToOffset(absl::string_view file, uint64_t data_bytes);

}  // namespace carrel::kvstore
