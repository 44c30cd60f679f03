// What:   the contexts of one folder: RocksDB as a memory-mapped array store. The only place that
//         knows RocksDB.
// Source: docs/architecture.md, section 6. Values are found in the mapped SSTs by our own checked
//         walk (sst_blocks.h), not by RocksDB's iterators.
// Errors: FailedPrecondition locked by another process, or open read-only; NotFound the folder
//         holds no store; NotFound, AlreadyExists a context (names it); DataLoss a segment (names
//         context, kind, layer, head, segment) or a manifest; FailedPrecondition a context of
//         another format version (names both); ResourceExhausted disk full (names the path), or no
//         file descriptor left (names the limit); PermissionDenied (names folder and user).
// Threads: a Store and what it returns may be used from any thread. Contexts and segments outlive
//         their Store.
//
// Invariants
//   1. A context is visible after Publish returned OK, wholly; before, and after a crash at any
//      point, not at all.
//   2. A published context is never edited. Delete hides it first (durably) and frees its files
//      then; what is mapped stays readable until released.
//   3. What a context gives is what was published with its manifest: a segment of another context,
//      store or revision is DataLoss. (Of format versions 1 and 2, which have no content id: what
//      fits number, place and CRCs.)
//   4. A context whose bytes are damaged does not make another unreadable.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/mapped_file.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/manifest.h"
#include "kvstore/format/segment.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/import_remains.h"
#include "kvstore/storage/unfinished.h"

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
  virtual uint8_t dtype() const = 0;
  virtual absl::Status Verify(int64_t begin, int64_t end) const = 0;
  virtual bool fully_verified() const = 0;
  // Where Verified may be asked without a call of this interface for each row; or null.
  virtual const SegmentView* view() const { return nullptr; }
  // Its pages come one by one (StoredContext::Expect): it pays to ask for them ahead.
  virtual bool sparse() const { return false; }
  // Starts reading what is not verified of payload bytes [begin, end) and returns.
  virtual void AskAhead(int64_t /*begin*/, int64_t /*end*/) const {}
};

// The published segments of one context.
class StoredContext {
 public:
  virtual ~StoredContext() = default;
  virtual const v1::Manifest& manifest() const = 0;
  // Maps a segment; touches only its footer and chunk table. Opened once and shared afterwards.
  // NotFound (names it) if there is none.
  virtual absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t layer, Kind kind,
                                                                       KvHead kv_head,
                                                                       uint32_t segment) const = 0;
  // How many consecutive segments from 0 there are of a kind.
  virtual absl::StatusOr<uint32_t> SegmentCount(int32_t layer, Kind kind, KvHead kv_head) const = 0;
  // How the context's files will be read from now on (kLargePages before): kSparse where a search
  // touches few rows, so that the first ones need not wait for a layer to be read; then Load.
  virtual void Expect(FileAccess /*access*/) const {}
  // Under kSparse: bytes of the layer's files, and how many of them were asked for one by one; 0
  // once it is loaded.
  virtual int64_t LayerBytes(int32_t /*layer*/) const { return 0; }
  virtual int64_t LayerBytesAsked(int32_t /*layer*/) const { return 0; }
  // Reads a layer's files into large pages, in order. May take as long as that takes; ends early
  // when `cancelled` is set.
  virtual void Load(int32_t /*layer*/, const std::atomic<bool>& /*cancelled*/) const {}
  // How often a layer's files were found changed since they were opened, now included; then all that
  // is known of them was forgotten, and segments must be opened again. Who uses what was read looks
  // before and after: two equal numbers say that nothing was written in between (decision 035).
  // DataLoss (names the file): it cannot be read any more, or has another size; open the context
  // anew. Cost: 0.3 us per file of the layer.
  virtual absl::StatusOr<int64_t> Look(int32_t /*layer*/) const { return 0; }
  // The same over all files.
  virtual absl::StatusOr<int64_t> LookAtAll() const { return 0; }

  // Reads all files again, without this process's mappings, and compares with the CRCs. Calls
  // go_on(bytes) after each step of at most kScrubStep; false ends it. A damaged value is appended to `damaged`,
  // once per file, and all that is known of its file is forgotten, so that reads of it are DataLoss
  // from then on. What was not in the page cache is not left there.
  static constexpr int64_t kScrubStep = int64_t{1} << 20;
  virtual void Scrub(absl::FunctionRef<bool(int64_t)> /*go_on*/,
                     std::vector<absl::Status>& /*damaged*/) const {}

  // Takes the pages of a layer's files out of this process; they come back when they are read, and
  // are verified again.
  virtual void ReleasePages(int32_t /*layer*/) const {}
};

// What a publication needs of the disk beside the files that it moves.
inline constexpr int64_t kPublishRoom = int64_t{4} << 20;

enum class StoreMode : uint8_t {
  kReadOnly = 0,   // no lock, writes nothing; sees what was published before, and after Refresh
  kReadWrite = 1,  // one process at a time; frees what a crash during Delete left behind
};

class Store {
 public:
  // kReadWrite creates the folder if it is absent; kReadOnly does not. InvalidArgument: s3://.., a bucket.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const std::string& folder, StoreMode mode);
  virtual ~Store() = default;

  // Ordered by name. Contexts that cannot be read (damaged, or of another format version) are
  // appended to `unreadable`, each with a message naming it; without it the first is the error.
  virtual absl::StatusOr<std::vector<v1::Manifest>> List(
      std::vector<absl::Status>* unreadable = nullptr) const = 0;
  virtual absl::StatusOr<v1::Manifest> GetManifest(const std::string& name) const = 0;
  // Prefills into this store that did not end.
  virtual absl::StatusOr<std::vector<UnfinishedPrefill>> ListUnfinished() const = 0;
  virtual absl::StatusOr<std::shared_ptr<const StoredContext>> OpenContext(
      const std::string& name) const = 0;

  // The context as a stream of bytes (context_stream.h), for another store's Import.
  // FailedPrecondition: it is unbound.
  virtual absl::StatusOr<std::unique_ptr<ContextExport>> Export(const std::string& name) const = 0;
  // kReadOnly: sees what another process published and deleted since; true: there may be something.
  // On an error it sees what it saw. Cost: some us if nothing changed, else as Open. kReadWrite:
  // false.
  virtual absl::StatusOr<bool> Refresh() = 0;

  // kReadWrite only.
  // Takes in what Export gave, wherever; goes on with what an interrupted import of the same context
  // left. name: what the context is to be called here; empty: as it was called there. The store
  // outlives it.
  virtual absl::StatusOr<std::unique_ptr<ContextImport>> Import(const std::string& name,
                                                                const ImportGuard& guard = {}) = 0;
  // Removes what interrupted imports left that nobody has gone on with for so long.
  virtual RemovedRemains RemoveOldImports(absl::Duration age) = 0;
  // The same of prefills.
  virtual RemovedUnfinished RemoveOldUnfinished(absl::Duration age) = 0;
  // Moves the SST files (of SstWriter, with disjoint ranges, all of manifest.context_id, at least
  // one, best on the store's file system) and the manifest, completed by their digests, in,
  // atomically. AlreadyExists if the name is taken, or the context is here under any. On an error
  // the files stay where they are.
  virtual absl::Status Publish(const v1::Manifest& manifest,
                               absl::Span<const std::string> sst_files) = 0;
  // Where there is no context of the name: an unfinished prefill of it (FailedPrecondition: it is
  // being worked on).
  // A context whose manifest is damaged has lost its name, and so have two of one name; "#ID" (in
  // the message of List) deletes it. While there is such a one, other names that are not found are DataLoss, not NotFound.
  virtual absl::Status Delete(const std::string& name) = 0;
  // Rewrites a context of format version 1 or 2 in this one, under its name: all of it is read,
  // verified and written once more, then swapped in atomically; whoever has the old one open keeps
  // it. Binds what is there: what was mixed before stays mixed. After a crash the old one is there,
  // and nothing else. FailedPrecondition it is of this format already; DataLoss a part is damaged or
  // missing; ResourceExhausted no room for it twice. progress: told the share that is done.
  virtual absl::Status Upgrade(const std::string& name,
                               absl::FunctionRef<void(double)> progress) = 0;
};

// Writes segments of one context into one SST file, in key order. Finish syncs; without it the file
// is not valid. Not thread-safe. Cost: holds one value twice.
class SstWriter {
 public:
  static absl::StatusOr<std::unique_ptr<SstWriter>> Create(const std::string& path);
  virtual ~SstWriter() = default;
  // InvalidArgument: a key of another context, out of order, or of the manifest (Publish's own).
  virtual absl::Status Add(const SegmentKey& key, absl::string_view payload, uint8_t dtype) = 0;
  virtual absl::Status Finish() = 0;  // once
};

}  // namespace carrel::kvstore
