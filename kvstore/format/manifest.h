// What:   what a manifest must hold before anything is made of it, and how it binds the bytes of
//         its context: the manifest holds a digest of every segment's chunk table and footer, the
//         table a CRC of every chunk, and the SHA-256 of the manifest, the content id, names all of
//         it. Digests and CRCs tell apart what was confused or damaged; against somebody who
//         computes CRCs that fit, they are no signature.
// Bytes:  proto/carrel/v1/context.proto; docs/formats.md.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/format/keys.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::kvstore {

// Of what is written, and the oldest that is read (docs/formats.md).
inline constexpr uint32_t kManifestFormatVersion = 3;
inline constexpr uint32_t kOldestManifestFormatVersion = 1;
// The last one whose files are not bound to their manifest.
inline constexpr uint32_t kUnboundManifestFormatVersion = 2;

inline constexpr int64_t kMaxTokens = int64_t{1} << 31;       // indexes count rows in 32 bits
inline constexpr int64_t kMaxHeads = int64_t{1} << 20;        // layers x KV heads
inline constexpr int64_t kMaxStoredBytes = int64_t{1} << 60;  // sum of layer_sizes

// Whether shape, sizes and lists are within their bounds and fit each other, so that what is
// allocated and summed by them is: DataLoss that names the field, its value and the bound. The name
// and the format version are not looked at.
absl::Status CheckManifest(const v1::Manifest& manifest);

// DataLoss: neither a number nor 16 bytes, as the format version wants them.
absl::StatusOr<ContextId> ContextIdOf(const v1::Manifest& manifest);

// OK if `wanted` is empty, the content id, or its first 12 digits or more. InvalidArgument: is no
// such. FailedPrecondition: names another content, or the context has no content id.
absl::Status CheckContentId(absl::string_view wanted, const v1::Manifest& manifest);

// Of a value that SegmentView::Open has accepted under its key.
inline constexpr int64_t kDigestBytes = 16;
std::string SegmentDigest(absl::string_view key, absl::string_view proof);

// To be called in order of keys. DataLoss: a segment is left out.
absl::Status AddSegmentDigest(const SegmentKey& key, absl::string_view digest,
                              v1::Manifest& manifest);

// The digests of a manifest, by key. Keeps views into the manifest, which outlives it and stays
// where it is. Threads: any.
class SegmentDigests {
 public:
  SegmentDigests() = default;
  // DataLoss: out of order, or bytes that are no digests.
  static absl::StatusOr<SegmentDigests> Of(const v1::Manifest& manifest);

  uint32_t Count(int32_t layer, Kind kind, KvHead kv_head) const;
  absl::string_view Find(const SegmentKey& key) const;  // empty: the context has no such segment

 private:
  absl::flat_hash_map<uint64_t, absl::string_view> digests_;  // by layer, kind and head
};

}  // namespace carrel::kvstore
