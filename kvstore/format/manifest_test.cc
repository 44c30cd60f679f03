#include "kvstore/format/manifest.h"

#include "absl/strings/escaping.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

SegmentKey KeyOf(int32_t layer, Kind kind, int32_t head, uint32_t segment) {
  const std::string id = absl::HexStringToBytes("8102030405060708090a0b0c0d0e0f10");
  return {*ContextId::FromBytes(id), layer, kind, KvHead(head), segment};
}

TEST(ManifestTest, SegmentDigest_OfAKnownKey_HasGoldenBytes) {
  const std::string key = EncodeKey(KeyOf(3, Kind::kValueRows, 0x0a0b, 0x0c0d0e0f));
  EXPECT_EQ(absl::BytesToHexString(SegmentDigest(key, "proof")),
            "dd8aab575abeaaacaa737589f26841b3");
}

TEST(ManifestTest, SegmentDigests_FindWhatWasAddedAndNothingElse) {
  v1::Manifest manifest;
  const auto digest = [](char c) { return std::string(kDigestBytes, c); };
  CARREL_ASSERT_OK(AddSegmentDigest(KeyOf(-1, Kind::kTokenIds, 0, 0), digest('a'), manifest));
  CARREL_ASSERT_OK(AddSegmentDigest(KeyOf(0, Kind::kKeyRows, 1, 0), digest('b'), manifest));
  CARREL_ASSERT_OK(AddSegmentDigest(KeyOf(0, Kind::kKeyRows, 1, 1), digest('c'), manifest));
  EXPECT_THAT(AddSegmentDigest(KeyOf(0, Kind::kKeyRows, 1, 3), digest('d'), manifest),
              StatusIs(StatusCode::kDataLoss, "segment 3 follows 2 segments"));
  const auto digests = SegmentDigests::Of(manifest);
  CARREL_ASSERT_OK(digests);
  EXPECT_EQ(digests->Count(-1, Kind::kTokenIds, KvHead(0)), 1u);
  EXPECT_EQ(digests->Count(0, Kind::kKeyRows, KvHead(1)), 2u);
  EXPECT_EQ(digests->Count(0, Kind::kKeyRows, KvHead(0)), 0u);
  EXPECT_EQ(digests->Count(0, Kind::kValueRows, KvHead(1)), 0u);
  EXPECT_EQ(digests->Find(KeyOf(0, Kind::kKeyRows, 1, 1)), digest('c'));
  EXPECT_EQ(digests->Find(KeyOf(0, Kind::kKeyRows, 1, 2)), "");
  EXPECT_EQ(digests->Find(KeyOf(1, Kind::kKeyRows, 1, 0)), "");
}

TEST(ManifestTest, SegmentDigestsThatAreNone_AreDataLoss) {
  const auto of = [](uint32_t layer_plus_one, uint32_t kind, uint32_t head, size_t bytes) {
    v1::Manifest manifest;
    v1::SegmentDigests& digests = *manifest.add_segment_digests();
    digests.set_layer_plus_one(layer_plus_one);
    digests.set_kind(kind);
    digests.set_kv_head(head);
    digests.set_digests(std::string(bytes, 'x'));
    return SegmentDigests::Of(manifest).status();
  };
  CARREL_EXPECT_OK(of(1, 16, 0, 16));
  for (const absl::Status& status :
       {of(0, 16, 0, 16), of(1, 1, 0, 16), of(1, 99, 0, 16), of(1, 16 + 256, 0, 16),
        of(1, 16, 1 << 16, 16), of(UINT32_MAX, 16, 0, 16), of(1, 16, 0, 0), of(1, 16, 0, 17)}) {
    EXPECT_THAT(status, StatusIs(StatusCode::kDataLoss, "segment_digests"));
  }
}

TEST(ManifestTest, ContextIdOf_IsOfTheFormatVersion) {
  v1::Manifest manifest;
  manifest.set_format_version(2);
  manifest.set_number(7);
  EXPECT_EQ(*ContextIdOf(manifest), ContextId(7));
  manifest.set_format_version(3);
  EXPECT_THAT(ContextIdOf(manifest), StatusIs(StatusCode::kDataLoss, "context_id of 0 bytes"));
  manifest.set_context_id(ContextId(7).Bytes());
  EXPECT_THAT(ContextIdOf(manifest), StatusIs(StatusCode::kDataLoss, "context_id of 8 bytes"));
  const ContextId id = ContextId::Random();
  manifest.set_context_id(id.Bytes());
  EXPECT_EQ(*ContextIdOf(manifest), id);
}

}  // namespace
}  // namespace carrel::kvstore
