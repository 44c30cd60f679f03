// What:   the keys of a store. A context is one key range and each of its layers is one: prefill
//         writes a layer's SST when the layer is done, and files never overlap.
// Bytes:  context id 16 bytes | layer_plus_one u16 | kind u8 | kv_head u16 | segment u32, all
//         big-endian: 25 bytes, so byte order is key order. layer_plus_one = 0 holds what belongs
//         to the whole context (manifest, token ids), which therefore comes first. (Differs from
//         the design sketch, which puts kind before layer: layer files would overlap and be
//         ingested at level 0.) Under an id that is a number the id has 8 bytes, the key 17.
// Edge:   number 0 is of no context; its range is the store's own.
// Errors: Decode refuses (DataLoss) another length, an unknown kind and a layer, head or segment
//         that does not fit the kind.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "kvstore/format/context_id.h"

namespace carrel::kvstore {

enum class Kind : uint8_t {
  kManifest = 1,         // protobuf; layer, head and segment 0
  kTokenIds = 2,         // int32; segments of 1 Mi tokens
  kKeyRows = 16,         // K [rows, head_dim]
  kValueRows = 17,       // V [rows, head_dim]
  kSampledQueries = 18,  // queries of the group's q heads at sampled positions
  kIndex = 19,           // an index blob, its own bytes; segment counts chunks of kIndexChunkBytes
  kSummaries = 20,       // cluster summaries, likewise
  kQueryDrift = 21,      // f32 [q_heads, head_dim] of a layer; head 0
};

inline constexpr int64_t kKeyBytes = 25;
inline constexpr int64_t kNumberedKeyBytes = 17;  // under an id that is a number
inline constexpr int32_t kMaxLayer = 65534;
inline constexpr int32_t kMaxKvHead = 65535;
inline constexpr int64_t kDefaultSegmentTokens = 65536;
inline constexpr int64_t kIndexChunkBytes = int64_t{64} << 20;
inline constexpr int64_t kTokenIdsPerSegment = int64_t{1} << 20;

struct SegmentKey {
  ContextId context;
  int32_t layer = -1;  // -1: of the whole context
  Kind kind = Kind::kManifest;
  KvHead kv_head;
  uint32_t segment = 0;
  bool operator==(const SegmentKey&) const = default;
};

absl::string_view KindName(Kind kind);  // "manifest", "token ids", "K rows", ...

// InvalidArgument for what cannot be encoded: a layer, head or segment that does not fit the kind.
absl::Status ValidateKey(const SegmentKey& key);

std::string EncodeKey(const SegmentKey& key);  // of a valid key
absl::StatusOr<SegmentKey> DecodeKey(absl::string_view bytes);

// The next bytes of the same length in order: of an encoded key; they may be no key.
std::string BytesBefore(absl::string_view key);
std::string BytesAfter(absl::string_view key);
// Of a key's bytes, or of those beside one.
absl::StatusOr<ContextId> ContextOfKey(absl::string_view bytes);

// The range [first, second) of every key of the context.
std::pair<std::string, std::string> ContextKeyRange(ContextId context);

// "K rows, layer 3, kv_head 1, segment 0": for messages.
std::string DescribeKey(const SegmentKey& key);

}  // namespace carrel::kvstore
