#include "kvstore/format/manifest.h"

#include <array>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr size_t kLeastContentIdDigits = 12;
constexpr size_t kContentIdDigits = 64;

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(field, "=", value, ", must be ", least, " .. ", most));
}

absl::Status CheckShape(const v1::Manifest& m) {
  RETURN_IF_ERROR(CheckRange("tokens", m.tokens(), 1, kMaxTokens));
  RETURN_IF_ERROR(CheckRange("segment_tokens", m.segment_tokens(), 1, kMaxTokens));
  RETURN_IF_ERROR(CheckRange("layers", m.layers(), 1, kMaxLayer));
  RETURN_IF_ERROR(CheckRange("kv_heads", m.kv_heads(), 1, 4096));
  RETURN_IF_ERROR(CheckRange("q_heads", m.q_heads(), 1, 4096));
  RETURN_IF_ERROR(CheckRange("head_dim", m.head_dim(), 1, 4096));
  if (m.q_heads() % m.kv_heads() != 0) {
    return absl::DataLossError(
        absl::StrCat("q_heads=", m.q_heads(), " is no multiple of kv_heads=", m.kv_heads()));
  }
  return CheckRange("layers x kv_heads", int64_t{m.layers()} * m.kv_heads(), 1, kMaxHeads);
}

absl::Status CheckSizes(const v1::Manifest& m) {
  int64_t left = kMaxStoredBytes;
  for (const v1::LayerSizes& sizes : m.layer_sizes()) {
    for (const int64_t bytes :
         {sizes.key_bytes(), sizes.value_bytes(), sizes.index_bytes(), sizes.sampled_query_bytes(),
          sizes.summary_bytes(), sizes.query_drift_bytes()}) {
      if (bytes < 0 || bytes > left) {
        return absl::DataLossError(absl::StrCat("layer_sizes of layer ", sizes.layer(), ": ", bytes,
                                                " bytes, of all layers there are 0 .. ",
                                                kMaxStoredBytes));
      }
      left -= bytes;
    }
  }
  return absl::OkStatus();
}

uint64_t HeadOf(int32_t layer, Kind kind, KvHead kv_head) {
  return static_cast<uint64_t>(layer + 1) << 32 | static_cast<uint64_t>(kind) << 24 |
         static_cast<uint64_t>(kv_head.value());
}

absl::Status AnotherContent(absl::string_view wanted, const v1::Manifest& manifest) {
  return absl::FailedPreconditionError(absl::StrCat("context ", manifest.name(), " has content id ",
                                                    manifest.content_id(), ", wanted is ", wanted));
}

}  // namespace

absl::Status CheckManifest(const v1::Manifest& m) {
  RETURN_IF_ERROR(CheckShape(m));
  RETURN_IF_ERROR(CheckSizes(m));
  const int64_t heads = int64_t{m.layers()} * m.kv_heads();
  const int64_t q_heads = int64_t{m.layers()} * m.q_heads();
  RETURN_IF_ERROR(CheckRange("layer_sizes", m.layer_sizes_size(), 0, m.layers()));
  RETURN_IF_ERROR(CheckRange("head_statistics", m.head_statistics_size(), 0, q_heads));
  RETURN_IF_ERROR(CheckRange("head_fidelity", m.head_fidelity_size(), 0, heads));
  return CheckRange("head_indexes", m.head_indexes_size(), 0, heads);
}

absl::StatusOr<ContextId> ContextIdOf(const v1::Manifest& manifest) {
  if (manifest.format_version() <= kUnboundManifestFormatVersion) {
    return ContextId(manifest.number());
  }
  const std::optional<ContextId> id = ContextId::FromBytes(manifest.context_id());
  if (id.has_value() && !id->is_number()) return *id;
  return absl::DataLossError(
      absl::StrCat("context_id of ", manifest.context_id().size(), " bytes (",
                   absl::BytesToHexString(manifest.context_id().substr(0, 32)),
                   "), must be 16 whose first bit is set"));
}

absl::Status CheckContentId(absl::string_view wanted, const v1::Manifest& manifest) {
  if (wanted.empty()) return absl::OkStatus();
  const bool digits = wanted.find_first_not_of("0123456789abcdef") == absl::string_view::npos;
  if (!digits || wanted.size() < kLeastContentIdDigits || wanted.size() > kContentIdDigits) {
    return absl::InvalidArgumentError(absl::StrCat(
        "content id \"", absl::CHexEscape(wanted.substr(0, kContentIdDigits)), "\" is not ",
        kLeastContentIdDigits, " to ", kContentIdDigits, " digits of 0-9 a-f"));
  }
  if (manifest.content_id().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "context ", manifest.name(), " has no content id, being of format version ",
        manifest.format_version(), "; carrel upgrade ", manifest.name(), " gives it one"));
  }
  return absl::StartsWith(manifest.content_id(), wanted) ? absl::OkStatus()
                                                         : AnotherContent(wanted, manifest);
}

std::string SegmentDigest(absl::string_view key, absl::string_view proof) {
  Sha256 sha;
  sha.Update(key);
  sha.Update(proof);
  const std::array<uint8_t, 32> all = sha.Finish();
  return std::string(reinterpret_cast<const char*>(all.data()), kDigestBytes);
}

absl::Status AddSegmentDigest(const SegmentKey& key, absl::string_view digest,
                              v1::Manifest& manifest) {
  v1::SegmentDigests* last = nullptr;
  if (!manifest.segment_digests().empty()) {
    last = manifest.mutable_segment_digests(manifest.segment_digests_size() - 1);
  }
  const auto layer_plus_one = static_cast<uint32_t>(key.layer + 1);
  const auto kind = static_cast<uint32_t>(key.kind);
  const auto kv_head = static_cast<uint32_t>(key.kv_head.value());
  if (last == nullptr || std::make_tuple(last->layer_plus_one(), last->kind(), last->kv_head()) !=
                             std::make_tuple(layer_plus_one, kind, kv_head)) {
    last = manifest.add_segment_digests();
    last->set_layer_plus_one(layer_plus_one);
    last->set_kind(kind);
    last->set_kv_head(kv_head);
  }
  if (key.segment != last->digests().size() / kDigestBytes) {
    return absl::DataLossError(absl::StrCat(DescribeKey(key), " follows ",
                                            last->digests().size() / kDigestBytes, " segments"));
  }
  last->mutable_digests()->append(digest.data(), digest.size());
  return absl::OkStatus();
}

absl::StatusOr<SegmentDigests> SegmentDigests::Of(const v1::Manifest& manifest) {
  SegmentDigests digests;
  digests.digests_.reserve(static_cast<size_t>(manifest.segment_digests_size()));
  std::tuple<uint32_t, uint32_t, uint32_t> before;  // no key's: the manifest has none of its own
  for (const v1::SegmentDigests& of_head : manifest.segment_digests()) {
    const auto at = std::make_tuple(of_head.layer_plus_one(), of_head.kind(), of_head.kv_head());
    const bool fits = of_head.layer_plus_one() <= kMaxLayer + 1 && of_head.kind() <= UINT8_MAX &&
                      of_head.kv_head() <= kMaxKvHead;
    const SegmentKey key{{},
                         static_cast<int32_t>(of_head.layer_plus_one()) - 1,
                         static_cast<Kind>(of_head.kind()),
                         KvHead(static_cast<int32_t>(of_head.kv_head())),
                         0};
    if (!fits || !ValidateKey(key).ok() || key.kind == Kind::kManifest || at <= before ||
        of_head.digests().empty() || of_head.digests().size() % kDigestBytes != 0) {
      return absl::DataLossError(
          absl::StrCat("segment_digests: ", of_head.digests().size(), " bytes of layer ",
                       int64_t{of_head.layer_plus_one()} - 1, ", kind ", of_head.kind(),
                       ", kv_head ", of_head.kv_head(), " are no digests, or out of order"));
    }
    before = at;
    digests.digests_[HeadOf(key.layer, key.kind, key.kv_head)] = of_head.digests();
  }
  return digests;
}

uint32_t SegmentDigests::Count(int32_t layer, Kind kind, KvHead kv_head) const {
  const auto found = digests_.find(HeadOf(layer, kind, kv_head));
  return found == digests_.end() ? 0 : static_cast<uint32_t>(found->second.size() / kDigestBytes);
}

absl::string_view SegmentDigests::Find(const SegmentKey& key) const {
  if (key.segment >= Count(key.layer, key.kind, key.kv_head)) return {};
  const absl::string_view all = digests_.find(HeadOf(key.layer, key.kind, key.kv_head))->second;
  return all.substr(size_t{key.segment} * kDigestBytes, kDigestBytes);
}

}  // namespace carrel::kvstore
