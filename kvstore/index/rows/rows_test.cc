#include "kvstore/index/rows/rows.h"

#include <cstring>

#include "common/test_util.h"
#include "kvstore/index/index_test_util.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

TEST(RowsTest, OpenKeysAndValues_OfAStore_AreThePublishedRows) {
  const std::string dir = FreshTempDir();
  const TestContextSpec spec{.tokens = 1000, .segment_tokens = 300, .seed = TestSeed()};
  const auto store = *Store::Open(dir + "/store", StoreMode::kReadWrite);
  const auto id = PublishTestContext(*store, dir + "/staging", spec);
  CARREL_ASSERT_OK(id);
  const auto context = *store->OpenContext(spec.name);
  for (const Kind kind : {Kind::kKeyRows, Kind::kValueRows}) {
    const auto rows = kind == Kind::kKeyRows ? Rows::OpenKeys(*context, Layer(1), KvHead(1))
                                             : Rows::OpenValues(*context, Layer(1), KvHead(1));
    CARREL_ASSERT_OK(rows);
    EXPECT_EQ(rows->count(), 1000);
    EXPECT_EQ(rows->head_dim(), 16);
    EXPECT_FALSE(rows->fully_verified());
    CARREL_EXPECT_OK(rows->Verify({0, 1000}));
    EXPECT_TRUE(rows->fully_verified());
    for (const Position row : {0, 1, 299, 300, 599, 600, 899, 900, 999}) {
      const std::string payload =
          TestPayload(spec, {*id, 1, kind, KvHead(1), static_cast<uint32_t>(row / 300)});
      EXPECT_EQ(std::memcmp(rows->Address(row), payload.data() + row % 300 * 32, 32), 0) << row;
    }
  }
}

TEST(RowsTest, ForEachPiece_AnyRange_CoversItOnceInOrder) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 500, 8);
  const MemoryContext context(keys, 64);
  const Rows rows = *Rows::OpenKeys(context, Layer(0), KvHead(0));
  for (int round = 0; round < 200; ++round) {
    const auto begin = static_cast<Position>(rng() % 501);
    const auto end = begin + static_cast<Position>(rng() % static_cast<uint64_t>(501 - begin));
    Position at = begin;
    rows.ForEachPiece({begin, end}, [&](Position first, const void* address, int64_t count) {
      EXPECT_EQ(first, at);
      EXPECT_GT(count, 0);
      EXPECT_LE(first % 64 + count, 64) << "contiguous";
      EXPECT_EQ(std::memcmp(address, keys.Row(first), static_cast<size_t>(count * 16)), 0);
      at = first + count;
    });
    EXPECT_EQ(at, end);
  }
}

TEST(RowsTest, Verify_FlippedBit_IsDataLossWhereTouched) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 4096, 32);  // 64 bytes per row: 64 rows per chunk
  MemoryContext context(keys, 2048);
  context.value(1)[100 * 64] ^= 4;
  const Rows rows = *Rows::OpenKeys(context, Layer(0), KvHead(0));
  CARREL_EXPECT_OK(rows.Verify({0, 2048 + 64}));
  CARREL_EXPECT_OK(rows.Verify({2048 + 128, 4096}));
  const std::string where = "context memory: K rows, layer 0, kv_head 0, segment 1";
  EXPECT_THAT(rows.VerifyRow(2048 + 100), StatusIs(StatusCode::kDataLoss, where));
  EXPECT_THAT(rows.Verify({0, 4096}), StatusIs(StatusCode::kDataLoss, where));
}

TEST(RowsTest, VerifyRows_InAnyOrder_TouchesTheirChunksAlone) {
  for (const int64_t segment : {2048, 1500}) {
    const std::string dir = FreshTempDir();
    const TestContextSpec spec{.tokens = 4000, .segment_tokens = segment, .seed = TestSeed()};
    const auto store = *Store::Open(dir + "/store", StoreMode::kReadWrite);
    CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", spec));
    const auto context = *store->OpenContext(spec.name);
    const Rows rows = *Rows::OpenKeys(*context, Layer(0), KvHead(0));
    const std::vector<Position> first = {3999, 0, 1700}, again = {1, 1701, 3998, 2500};
    CARREL_EXPECT_OK(rows.VerifyRows(first.data(), 3));
    EXPECT_FALSE(rows.fully_verified());
    CARREL_EXPECT_OK(rows.VerifyRows(again.data(), 4));
    CARREL_EXPECT_OK(rows.VerifyRows(again.data(), 4));
    const std::vector<int64_t> outside = {0, 4000};
    EXPECT_THAT(rows.VerifyRows(outside.data(), 2), StatusIs(StatusCode::kOutOfRange, "of 4000"));
    CARREL_EXPECT_OK(rows.Verify({0, 4000}));
    EXPECT_TRUE(rows.fully_verified());
    EXPECT_THAT(rows.VerifyRows(outside.data(), 2), StatusIs(StatusCode::kOutOfRange, "of 4000"));
  }
}

TEST(RowsTest, Verify_OutsideTheRows_IsOutOfRange) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 10, 8);
  const Rows rows = keys.AsRows();
  EXPECT_THAT(rows.Verify({0, 11}), StatusIs(StatusCode::kOutOfRange, "[0, 11) of 10"));
  EXPECT_THAT(rows.Verify({-1, 1}), StatusIs(StatusCode::kOutOfRange, "[-1, 1)"));
  CARREL_EXPECT_OK(rows.Verify({10, 10}));
}

TEST(RowsTest, Open_WhatTheManifestDoesNotDescribe_IsRefused) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 500, 8);
  MemoryContext context(keys, 200);
  EXPECT_THAT(Rows::OpenKeys(context, Layer(1), KvHead(0)),
              StatusIs(StatusCode::kInvalidArgument, "layer 1, must be below 1"));
  EXPECT_THAT(Rows::OpenKeys(context, Layer(0), KvHead(-1)),
              StatusIs(StatusCode::kInvalidArgument, "kv_head -1, must be below 1"));
  EXPECT_THAT(Rows::OpenValues(context, Layer(0), KvHead(0)),
              StatusIs(StatusCode::kDataLoss, "0 segments are stored, 500 rows make 3"));
  context.mutable_manifest().set_tokens(600);
  EXPECT_THAT(Rows::OpenKeys(context, Layer(0), KvHead(0)),
              StatusIs(StatusCode::kDataLoss, "segment 2: 1600 bytes"));
  context.mutable_manifest().set_tokens(400);
  EXPECT_THAT(Rows::OpenKeys(context, Layer(0), KvHead(0)),
              StatusIs(StatusCode::kDataLoss, "3 segments are stored, 400 rows make 2"));
  context.mutable_manifest().set_tokens(500);
  context.mutable_manifest().set_kv_dtype("fp8");
  EXPECT_THAT(Rows::OpenKeys(context, Layer(0), KvHead(0)),
              StatusIs(StatusCode::kFailedPrecondition, "fp8"));
  context.mutable_manifest().set_kv_dtype("bf16");
  context.mutable_manifest().set_segment_tokens(0);
  EXPECT_THAT(Rows::OpenKeys(context, Layer(0), KvHead(0)),
              StatusIs(StatusCode::kDataLoss, "segment_tokens=0"));
  context.mutable_manifest().set_segment_tokens(200);
  context.erase(1);
  EXPECT_THAT(Rows::OpenKeys(context, Layer(0), KvHead(0)),
              StatusIs(StatusCode::kDataLoss, "segment 1: 1 segments are stored"));
}

}  // namespace
}  // namespace carrel::kvstore
