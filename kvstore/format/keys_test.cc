#include "kvstore/format/keys.h"

#include <set>

#include "absl/strings/escaping.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

constexpr Kind kKinds[] = {Kind::kManifest,  Kind::kTokenIds,       Kind::kKeyRows,
                           Kind::kValueRows, Kind::kSampledQueries, Kind::kIndex,
                           Kind::kSummaries, Kind::kQueryDrift};

// Numbers with few and with many significant bytes alike.
uint64_t RandomOfAnySize(std::mt19937_64& rng, int bits) {
  return (rng() >> (64 - bits)) >> (rng() % static_cast<uint64_t>(bits));
}

ContextId RandomId(std::mt19937_64& rng) {
  if (rng() % 2 == 0) return ContextId(RandomOfAnySize(rng, 63));
  std::string bytes(16, '\0');
  for (char& c : bytes) c = static_cast<char>(rng());
  bytes[0] = static_cast<char>(bytes[0] | 0x80);
  return *ContextId::FromBytes(bytes);
}

SegmentKey RandomKey(std::mt19937_64& rng) {
  SegmentKey key;
  key.context = RandomId(rng);
  key.kind = kKinds[rng() % std::size(kKinds)];
  const bool whole = key.kind == Kind::kManifest || key.kind == Kind::kTokenIds;
  if (!whole) {
    key.layer = static_cast<int32_t>(
        std::min<uint64_t>(RandomOfAnySize(rng, 16), static_cast<uint64_t>(kMaxLayer)));
    if (key.kind != Kind::kQueryDrift)
      key.kv_head = KvHead(static_cast<int32_t>(RandomOfAnySize(rng, 16)));
  }
  if (key.kind != Kind::kManifest) key.segment = static_cast<uint32_t>(RandomOfAnySize(rng, 32));
  return key;
}

auto Order(const SegmentKey& key) {
  return std::make_tuple(key.context, key.layer, key.kind, key.kv_head, key.segment);
}

TEST(KeysTest, EncodeKey_KnownKey_HasGoldenBytes) {
  const std::string id = "\x81\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10";
  EXPECT_EQ(absl::BytesToHexString(EncodeKey(
                {*ContextId::FromBytes(id), 3, Kind::kValueRows, KvHead(0x0a0b), 0x0c0d0e0f})),
            "8102030405060708090a0b0c0d0e0f10"
            "0004"
            "11"
            "0a0b"
            "0c0d0e0f");
  const SegmentKey key{ContextId(0x0102030405060708), 3, Kind::kValueRows, KvHead(0x0a0b),
                       0x0c0d0e0f};
  EXPECT_EQ(absl::BytesToHexString(EncodeKey(key)),
            "0102030405060708"
            "0004"
            "11"
            "0a0b"
            "0c0d0e0f");
  const SegmentKey manifest{ContextId(1), -1, Kind::kManifest, KvHead(0), 0};
  EXPECT_EQ(absl::BytesToHexString(EncodeKey(manifest)),
            "0000000000000001"
            "0000"
            "01"
            "0000"
            "00000000");
}

TEST(KeysTest, DecodeKey_OfEncoded_IsTheKey) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    const SegmentKey key = RandomKey(rng);
    const auto decoded = DecodeKey(EncodeKey(key));
    CARREL_ASSERT_OK(decoded);
    EXPECT_EQ(*decoded, key) << DescribeKey(key);
  }
}

TEST(ContextIdTest, Random_DiffersAndIsReadBack) {
  std::set<ContextId> ids;
  for (int i = 0; i < 1000; ++i) {
    const ContextId id = ContextId::Random();
    EXPECT_FALSE(id.is_number());
    EXPECT_EQ(ContextId::FromBytes(id.Bytes()), id);
    EXPECT_EQ(id.ToString(), absl::BytesToHexString(id.Bytes()));
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 1000u);
  EXPECT_EQ(ContextId(7).ToString(), "7");
  EXPECT_EQ(ContextId::FromBytes(ContextId(7).Bytes()), ContextId(7));
  EXPECT_EQ(ContextId::FromBytes("x"), std::nullopt);
  EXPECT_EQ(ContextId::FromBytes(""), std::nullopt);
}

TEST(KeysTest, EncodedBytes_OrderAsKeysDo) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 5000; ++round) {
    SegmentKey a = RandomKey(rng), b = RandomKey(rng);
    if (rng() % 2 == 0) b.context = a.context;
    if (rng() % 2 == 0 && a.layer >= 0 && b.layer >= 0) b.layer = a.layer;
    if (rng() % 4 == 0) b.segment = b.kind == Kind::kManifest ? 0 : a.segment;
    EXPECT_EQ(EncodeKey(a) < EncodeKey(b), Order(a) < Order(b))
        << DescribeKey(a) << " and " << DescribeKey(b);
  }
}

TEST(KeysTest, ContextKeyRange_HoldsTheContextAndNoOther) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    SegmentKey key = RandomKey(rng);
    ContextId context = RandomId(rng);
    if (round % 10 == 0) context = *ContextId::FromBytes(std::string(16, '\xff'));
    if (round % 10 == 1) context = ContextId(INT64_MAX);
    if (rng() % 2 == 0) key.context = context;
    const auto next = ContextId::FromBytes(BytesAfter(context.Bytes()));
    if (rng() % 8 == 0 && next.has_value()) key.context = *next;
    const auto [begin, end] = ContextKeyRange(context);
    const std::string bytes = EncodeKey(key);
    EXPECT_EQ(begin <= bytes && bytes < end, key.context == context) << context;
  }
}

TEST(KeysTest, DecodeKey_WrongLengthKindOrLayer_IsDataLoss) {
  const std::string good = EncodeKey({ContextId(7), 0, Kind::kKeyRows, KvHead(0), 0});
  EXPECT_THAT(DecodeKey(good.substr(0, 16)),
              StatusIs(absl::StatusCode::kDataLoss, "key of 16 bytes, must be 25 or 17"));
  EXPECT_THAT(DecodeKey(good + "x"), StatusIs(absl::StatusCode::kDataLoss, "18 bytes"));
  EXPECT_THAT(DecodeKey(""), StatusIs(absl::StatusCode::kDataLoss, "0 bytes"));
  std::string unknown_kind = good;
  unknown_kind[10] = 99;
  EXPECT_THAT(DecodeKey(unknown_kind), StatusIs(absl::StatusCode::kDataLoss, "kind 99"));
  std::string rows_of_no_layer = good;
  rows_of_no_layer[9] = 0;
  EXPECT_THAT(DecodeKey(rows_of_no_layer), StatusIs(absl::StatusCode::kDataLoss, "layer -1"));
  std::string manifest_of_layer = good;
  manifest_of_layer[10] = 1;
  EXPECT_THAT(DecodeKey(manifest_of_layer), StatusIs(absl::StatusCode::kDataLoss, "layer 0"));
  // Numbers end where random ids begin.
  std::string too_large = good;
  too_large[0] = '\x80';
  EXPECT_THAT(DecodeKey(too_large), StatusIs(absl::StatusCode::kDataLoss, "the id of no context"));
  std::string too_small = EncodeKey({ContextId::Random(), 0, Kind::kKeyRows, KvHead(0), 0});
  CARREL_EXPECT_OK(DecodeKey(too_small));
  too_small[0] = '\x7f';
  EXPECT_THAT(DecodeKey(too_small), StatusIs(absl::StatusCode::kDataLoss, "the id of no context"));
}

TEST(KeysTest, BytesBesideAKey_AreItsNeighboursInOrder) {
  EXPECT_EQ(BytesAfter(std::string("a\x01", 2)), "a\x02");
  EXPECT_EQ(BytesAfter("a\xff\xff"), std::string("b\0\0", 3));
  EXPECT_EQ(BytesBefore("a\x02"), "a\x01");
  EXPECT_EQ(BytesBefore(std::string("b\0\0", 3)), "a\xff\xff");
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 1000; ++round) {
    const std::string key = EncodeKey(RandomKey(rng));
    const std::string before = BytesBefore(key), after = BytesAfter(key);
    EXPECT_LT(before, key);
    EXPECT_LT(key, after);
    EXPECT_EQ(BytesAfter(before), key);
    EXPECT_EQ(BytesBefore(after), key);
    EXPECT_EQ(*ContextOfKey(before), DecodeKey(key)->context);
    EXPECT_EQ(*ContextOfKey(after), DecodeKey(key)->context);
  }
}

TEST(KeysTest, DecodeKey_RandomBytes_DecodesOrIsDataLossAndReencodesEqually) {
  std::mt19937_64 rng(TestSeed());
  int decoded_keys = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(round % 4 < 2 ? 17 : 25, '\0');
    for (char& c : bytes) c = static_cast<char>(rng());
    if (round % 2 == 0) {
      bytes[bytes.size() - 7] = static_cast<char>(kKinds[rng() % std::size(kKinds)]);
    }
    const auto key = DecodeKey(bytes);
    if (key.ok()) {
      ++decoded_keys;
      EXPECT_EQ(EncodeKey(*key), bytes);
    } else {
      EXPECT_EQ(key.status().code(), absl::StatusCode::kDataLoss);
    }
  }
  EXPECT_GT(decoded_keys, 1000);
}

TEST(KeysTest, ValidateKey_OutOfRange_NamesFieldValueAndBound) {
  EXPECT_THAT(ValidateKey({ContextId(1), 65535, Kind::kKeyRows, KvHead(0), 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, "layer 65535, must be 0 .. 65534"));
  EXPECT_THAT(ValidateKey({ContextId(1), 0, Kind::kKeyRows, KvHead(65536), 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, "kv_head 65536"));
  EXPECT_THAT(ValidateKey({ContextId(1), -1, Kind::kManifest, KvHead(0), 2}),
              StatusIs(absl::StatusCode::kInvalidArgument, "segment 2"));
  EXPECT_THAT(ValidateKey({ContextId(1), 3, Kind::kQueryDrift, KvHead(1), 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, "kv_head 1, must be 0 .. 0"));
}

TEST(KeysTest, DescribeKey_NamesKindLayerHeadAndSegment) {
  EXPECT_EQ(DescribeKey({ContextId(1), 3, Kind::kKeyRows, KvHead(1), 0}),
            "K rows, layer 3, kv_head 1, segment 0");
  EXPECT_EQ(DescribeKey({ContextId(1), -1, Kind::kTokenIds, KvHead(0), 2}), "token ids, segment 2");
  EXPECT_EQ(DescribeKey({ContextId(1), -1, Kind::kManifest, KvHead(0), 0}), "manifest");
  EXPECT_EQ(DescribeKey({ContextId(1), 3, Kind::kQueryDrift, KvHead(0), 0}),
            "query drift, layer 3, segment 0");
}

}  // namespace
}  // namespace carrel::kvstore
