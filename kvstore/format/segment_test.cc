#include "kvstore/format/segment.h"

#include <thread>

#include "absl/strings/escaping.h"
#include "common/test_util.h"
#include "kvstore/format/keys.h"

namespace carrel::kvstore {
namespace {

const std::string kKey = EncodeKey({ContextId(1), 3, Kind::kKeyRows, KvHead(1), 0});

std::string RandomBytes(std::mt19937_64& rng, size_t count) {
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(rng());
  return bytes;
}

// What a reader who reads everything would see.
absl::Status OpenAndVerify(absl::string_view key, absl::string_view value) {
  auto view = SegmentView::Open(key, value);
  if (!view.ok()) return view.status();
  return (*view)->Verify(0, static_cast<int64_t>((*view)->payload().size()));
}

std::string WithBitFlipped(std::string value, size_t bit) {
  value[bit / 8] = static_cast<char>(value[bit / 8] ^ (1 << (bit % 8)));
  return value;
}

TEST(SegmentTest, EncodeSegment_KnownPayload_HasGoldenBytes) {
  // The payload's CRC is RFC 3720's check value e3069283; the footer's was computed by a second
  // implementation over key, chunk CRC and footer.
  EXPECT_EQ(absl::BytesToHexString(EncodeSegment(kKey, "123456789", 2)),
            "313233343536373839"
            "839206e3"
            "0900000000000000"
            "0100"
            "02"
            "00"
            "00000000"
            "6814f3de"
            "43534547");
}

TEST(SegmentTest, Open_OfEncoded_GivesPayloadAndDtype) {
  std::mt19937_64 rng(TestSeed());
  for (const size_t bytes : {0, 1, 23, 24, 4095, 4096, 4097, 8192, 262144, 262145, 1000003}) {
    const std::string payload = RandomBytes(rng, bytes);
    const std::string value = EncodeSegment(kKey, payload, 2);
    EXPECT_EQ(value.size(), bytes + (bytes + 4095) / 4096 * 4 + 24);
    const auto view = SegmentView::Open(kKey, value);
    CARREL_ASSERT_OK(view);
    EXPECT_EQ((*view)->payload(), payload);
    EXPECT_EQ((*view)->dtype(), 2);
    EXPECT_EQ((*view)->fully_verified(), bytes == 0);
    CARREL_EXPECT_OK((*view)->Verify(0, static_cast<int64_t>(bytes)));
    EXPECT_TRUE((*view)->fully_verified());
  }
}

TEST(SegmentTest, AnyFlippedBit_OfASmallValue_IsDetected) {
  std::mt19937_64 rng(TestSeed());
  for (const size_t bytes : {0, 5, 4096, 4100}) {
    const std::string value = EncodeSegment(kKey, RandomBytes(rng, bytes), 255);
    for (size_t bit = 0; bit < value.size() * 8; ++bit) {
      ASSERT_EQ(OpenAndVerify(kKey, WithBitFlipped(value, bit)).code(), absl::StatusCode::kDataLoss)
          << "bit " << bit << " of " << value.size() * 8;
    }
  }
}

TEST(SegmentTest, AnyFlippedBit_OfABigValue_IsDetected) {
  std::mt19937_64 rng(TestSeed());
  const std::string value = EncodeSegment(kKey, RandomBytes(rng, 3000001), 2);
  for (int round = 0; round < 300; ++round) {
    // A third each: anywhere, in the chunk table, in the footer.
    const size_t from = round % 3 == 0 ? 0 : round % 3 == 1 ? 3000001 : value.size() - 24;
    const size_t bit = from * 8 + rng() % ((value.size() - from) * 8);
    EXPECT_EQ(OpenAndVerify(kKey, WithBitFlipped(value, bit)).code(), absl::StatusCode::kDataLoss)
        << "bit " << bit;
  }
}

TEST(SegmentTest, FlippedBit_OfThePayload_LeavesOtherChunksReadable) {
  std::mt19937_64 rng(TestSeed());
  const std::string value = EncodeSegment(kKey, RandomBytes(rng, 100 * 4096 + 17), 2);
  const std::string damaged = WithBitFlipped(value, (70 * 4096 + 5) * 8);
  const auto view = SegmentView::Open(kKey, damaged);
  CARREL_ASSERT_OK(view);
  CARREL_EXPECT_OK((*view)->Verify(0, 70 * 4096));
  CARREL_EXPECT_OK((*view)->Verify(71 * 4096, 100 * 4096 + 17));
  const std::string where = "payload bytes [286720, 290816)";
  EXPECT_THAT((*view)->Verify(70 * 4096 + 4095, 70 * 4096 + 4096),
              StatusIs(absl::StatusCode::kDataLoss, where));
  // What failed once is not taken for verified later.
  EXPECT_THAT((*view)->Verify(0, 100 * 4096), StatusIs(absl::StatusCode::kDataLoss, where));
  EXPECT_FALSE((*view)->fully_verified());
}

TEST(SegmentTest, Verify_UntouchedChunks_StayUnverified) {
  std::mt19937_64 rng(TestSeed());
  const std::string value = EncodeSegment(kKey, RandomBytes(rng, 10 * 4096), 2);
  const auto view = SegmentView::Open(kKey, value);
  CARREL_ASSERT_OK(view);
  CARREL_EXPECT_OK((*view)->Verify(0, 9 * 4096));
  EXPECT_FALSE((*view)->fully_verified());
  CARREL_EXPECT_OK((*view)->Verify(5, 5));
  CARREL_EXPECT_OK((*view)->Verify(10 * 4096 - 1, 10 * 4096));
  EXPECT_TRUE((*view)->fully_verified());
}

TEST(SegmentTest, Forget_DamageDoneMeanwhile_IsFoundOnTheNextTouch) {
  std::string value = EncodeSegment(kKey, std::string(3 * kChunkBytes, 'x'), kDTypeBytes);
  const auto view = SegmentView::Open(kKey, value);
  CARREL_ASSERT_OK(view);
  CARREL_ASSERT_OK((*view)->Verify(0, 3 * kChunkBytes));
  EXPECT_TRUE((*view)->fully_verified());
  value[kChunkBytes + 5] ^= 1;
  CARREL_EXPECT_OK((*view)->Verify(0, 3 * kChunkBytes));  // known already
  (*view)->Forget();
  EXPECT_FALSE((*view)->fully_verified());
  CARREL_EXPECT_OK((*view)->Verify(0, kChunkBytes));
  EXPECT_THAT((*view)->Verify(0, 3 * kChunkBytes), StatusIs(absl::StatusCode::kDataLoss, "CRC"));
}

TEST(SegmentTest, Verify_OutsideThePayload_IsOutOfRange) {
  const std::string value = EncodeSegment(kKey, std::string(100, 'x'), 2);
  const auto view = SegmentView::Open(kKey, value);
  CARREL_ASSERT_OK(view);
  EXPECT_THAT((*view)->Verify(0, 101), StatusIs(absl::StatusCode::kOutOfRange, "[0, 101)"));
  EXPECT_THAT((*view)->Verify(-1, 5), StatusIs(absl::StatusCode::kOutOfRange, "100 bytes"));
  EXPECT_THAT((*view)->Verify(6, 5), StatusIs(absl::StatusCode::kOutOfRange, "[6, 5)"));
}

TEST(SegmentTest, Open_UnderAnotherKey_IsDataLoss) {
  const std::string value = EncodeSegment(kKey, "rows", 2);
  const std::string other = EncodeKey({ContextId(1), 3, Kind::kKeyRows, KvHead(1), 1});
  EXPECT_THAT(SegmentView::Open(other, value), StatusIs(absl::StatusCode::kDataLoss, "key"));
}

TEST(SegmentTest, Open_TruncatedOrExtended_IsDataLoss) {
  std::mt19937_64 rng(TestSeed());
  const std::string value = EncodeSegment(kKey, RandomBytes(rng, 9000), 2);
  for (size_t size = 0; size < value.size(); size += size < 8900 ? 97 : 1) {
    EXPECT_EQ(OpenAndVerify(kKey, value.substr(0, size)).code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(OpenAndVerify(kKey, value.substr(value.size() - size)).code(),
              absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(OpenAndVerify(kKey, value + "x").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(OpenAndVerify(kKey, "x" + value).code(), absl::StatusCode::kDataLoss);
}

TEST(SegmentTest, Open_RandomGarbage_IsDataLoss) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = RandomBytes(rng, rng() % 300);
    if (bytes.size() >= 24 && round % 4 != 0) {  // past the first checks
      bytes.replace(bytes.size() - 4, 4, "CSEG");
      uint64_t payload_bytes = round % 4 == 1 ? rng() : bytes.size() - 28 + rng() % 9;
      std::memcpy(bytes.data() + bytes.size() - 24, &payload_bytes, 8);
    }
    EXPECT_EQ(OpenAndVerify(kKey, bytes).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(SegmentTest, Verify_FromManyThreads_VerifiesEachChunkOnce) {
  std::mt19937_64 rng(TestSeed());
  constexpr int64_t kBytes = 200 * 4096 + 9;
  const std::string value = EncodeSegment(kKey, RandomBytes(rng, kBytes), 2);
  const auto view = SegmentView::Open(kKey, value);
  CARREL_ASSERT_OK(view);
  std::vector<std::thread> threads;
  std::atomic<int> failures = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&view, &failures, seed = rng()] {
      std::mt19937_64 own(seed);
      for (int i = 0; i < 500; ++i) {
        const int64_t begin = static_cast<int64_t>(own() % kBytes);
        const int64_t end =
            begin + static_cast<int64_t>(own() % static_cast<uint64_t>(
                                                     std::min<int64_t>(kBytes - begin, 20000) + 1));
        if (!(*view)->Verify(begin, end).ok()) ++failures;
      }
      if (!(*view)->Verify(0, kBytes).ok()) ++failures;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE((*view)->fully_verified());
}

}  // namespace
}  // namespace carrel::kvstore
