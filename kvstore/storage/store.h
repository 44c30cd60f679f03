// What:   the contexts of one folder: RocksDB as a memory-mapped array store. The only place that
// knows RocksDB. Source: architecture section 5. Values are read through a pinned iterator over
// mapped, uncompressed SSTs, never through Get. Errors: FailedPrecondition locked by another
// process, or the folder is no store (names it); NotFound, AlreadyExists a context (names it);
//         DataLoss a segment (names context, kind, layer, head, segment); ResourceExhausted disk
//         full.
// Threads: a Store and what it returns may be used from any thread.
//
// Invariants
//   1. A context is visible after Publish returned OK, wholly; before, and after a crash at any
//   point, not at all.
//   2. A published context is never edited. Delete hides it first (durably) and frees its files
//   then; what is mapped stays readable until released.
//   3. Context ids are never reused.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/segment.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::kvstore {

// One segment, pinned: its bytes stay mapped as long as this lives, also across Delete.
class PinnedSegment {
 public:
  virtual ~PinnedSegment() = default;
  // Verified up to Invariant 1 of SegmentView; DataLoss from Verify here names context, kind,
  // layer, head and segment.
  virtual absl::string_view payload() const = 0;
  virtual absl::Status Verify(int64_t begin, int64_t end) const = 0;
  virtual bool fully_verified() const = 0;
};

// The published segments of one context.
class StoredContext {
 public:
  virtual ~StoredContext() = default;
  virtual const v1::Manifest& manifest() const = 0;
  // Maps a segment; touches only its footer and chunk table. Opened once and shared afterwards.
  virtual absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t layer, Kind kind,
                                                                       KvHead kv_head,
                                                                       uint32_t segment) const = 0;
  // How many consecutive segments from 0 there are of a kind.
  virtual absl::StatusOr<uint32_t> SegmentCount(int32_t layer, Kind kind, KvHead kv_head) const = 0;
};

enum class StoreMode : uint8_t {
  kReadOnly = 0,   // no lock; sees what was published before
  kReadWrite = 1,  // one process at a time
};

class Store {
 public:
  // kReadWrite creates the folder if it is absent; kReadOnly does not.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const std::string& folder, StoreMode mode);
  virtual ~Store() = default;

  virtual absl::StatusOr<std::vector<v1::Manifest>> List() const = 0;  // ordered by name
  virtual absl::StatusOr<v1::Manifest> GetManifest(const std::string& name) const = 0;
  virtual absl::StatusOr<std::shared_ptr<const StoredContext>> OpenContext(
      const std::string& name) const = 0;

  // kReadWrite only.
  virtual absl::StatusOr<ContextId> AllocateContextId() = 0;  // durable before it returns
  // Moves the SST files (of SstWriter, with disjoint ranges, all of manifest.context_id) and the
  // manifest in, atomically. AlreadyExists if the name is taken.
  virtual absl::Status Publish(const v1::Manifest& manifest,
                               absl::Span<const std::string> sst_files) = 0;
  virtual absl::Status Delete(const std::string& name) = 0;
};

// Writes segments of one context into one SST file, in key order. Finish syncs; without it the file
// is not valid. Not thread-safe.
class SstWriter {
 public:
  static absl::StatusOr<std::unique_ptr<SstWriter>> Create(const std::string& path);
  virtual ~SstWriter() = default;
  virtual absl::Status Add(const SegmentKey& key, std::string payload, uint8_t dtype) = 0;
  virtual absl::Status Finish() = 0;
};

}  // namespace carrel::kvstore
