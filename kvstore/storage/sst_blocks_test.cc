#include "kvstore/storage/sst_blocks.h"

#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/segment.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

const ContextId kId = ContextId::Random();

SegmentKey KeyOf(uint32_t segment) { return {kId, 0, Kind::kKeyRows, KvHead(0), segment}; }

constexpr uint64_t kFenceBytes = 2 + 1 + 33 + 13;

// A file of three segments as SstWriter writes it, and the size of its data.
std::string WriteFile(const std::string& path, uint64_t* data_bytes) {
  auto writer = *SstWriter::Create(path);
  *data_bytes = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    const std::string payload(100 * i, 'p');
    CARREL_EXPECT_OK(writer->Add(KeyOf(i), payload, 2));
    const size_t value = EncodeSegment(EncodeKey(KeyOf(i)), payload, 2).size();
    *data_bytes += 2 + (value < 128 ? 1 : 2) + 33 + value + 13;
  }
  *data_bytes += 2 * kFenceBytes;
  CARREL_EXPECT_OK(writer->Finish());
  return *ReadFile(path);
}

TEST(SstBlocksTest, Walks_FindEveryValueOfAWrittenFile) {
  uint64_t data_bytes = 0;
  const std::string file = WriteFile(FreshTempDir() + "/a.sst", &data_bytes);
  for (const SstEntries& found :
       {WalkToOffset(file, data_bytes), WalkToKey(file, EncodeKey(KeyOf(2)))}) {
    CARREL_EXPECT_OK(found.status);
    ASSERT_EQ(found.entries.size(), 3u);
    for (uint32_t i = 0; i < 3; ++i) {
      EXPECT_EQ(found.entries[i].key, EncodeKey(KeyOf(i)));
      EXPECT_EQ(found.entries[i].value,
                EncodeSegment(EncodeKey(KeyOf(i)), std::string(100 * i, 'p'), 2));
    }
  }
}

TEST(SstBlocksTest, Walks_WrongEnds_AreDataLoss) {
  uint64_t data_bytes = 0;
  const std::string file = WriteFile(FreshTempDir() + "/a.sst", &data_bytes);
  EXPECT_EQ(WalkToOffset(file, data_bytes - 1).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(WalkToOffset(file, data_bytes + 1).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(WalkToOffset(file, file.size() + 1).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(WalkToOffset("", 0).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(WalkToKey("", EncodeKey(KeyOf(2))).status.code(), absl::StatusCode::kDataLoss);
  CARREL_EXPECT_OK(WalkToKey(file, BytesAfter(EncodeKey(KeyOf(2)))).status);
  const SstEntries beyond = WalkToKey(file, EncodeKey(KeyOf(4)));
  EXPECT_THAT(beyond.status, StatusIs(absl::StatusCode::kDataLoss,
                                      absl::StrCat("at offset ", data_bytes - kFenceBytes)));
  EXPECT_EQ(beyond.entries.size(), 3u);
  const SstEntries between = WalkToKey(file, EncodeKey(KeyOf(1)) + "x");
  EXPECT_THAT(between.status, StatusIs(absl::StatusCode::kDataLoss, "behind the last"));
  EXPECT_EQ(between.entries.size(), 2u);
}

TEST(SstBlocksTest, Fences_StandAtTheEndsOrNowhere) {
  uint64_t data_bytes = 0;
  const std::string file = WriteFile(FreshTempDir() + "/a.sst", &data_bytes);
  const SstEntries fenced = WalkToOffset(file, data_bytes);
  EXPECT_EQ(fenced.first_key, BytesBefore(EncodeKey(KeyOf(0))));
  EXPECT_EQ(fenced.last_key, BytesAfter(EncodeKey(KeyOf(2))));
  const std::string bare = file.substr(kFenceBytes, data_bytes - 2 * kFenceBytes);
  for (const SstEntries& found :
       {WalkToOffset(bare, bare.size()), WalkToKey(bare, EncodeKey(KeyOf(2)))}) {
    CARREL_EXPECT_OK(found.status);
    EXPECT_EQ(found.entries.size(), 3u);
    EXPECT_EQ(found.first_key, EncodeKey(KeyOf(0)));
  }
  std::string within = bare + file.substr(data_bytes - kFenceBytes, kFenceBytes) + bare;
  const SstEntries found = WalkToOffset(within, within.size());
  EXPECT_THAT(found.status, StatusIs(absl::StatusCode::kDataLoss,
                                     absl::StrCat("wrong key at offset ", bare.size())));
  EXPECT_EQ(found.entries.size(), 3u);
}

TEST(SstBlocksTest, MutatedFiles_NeverCrashAndEntriesStayInside) {
  std::mt19937_64 rng(TestSeed());
  uint64_t data_bytes = 0;
  const std::string file = WriteFile(FreshTempDir() + "/a.sst", &data_bytes);
  int damaged = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string mutated = file;
    for (uint64_t edits = 1 + rng() % 3; edits > 0; --edits) {
      mutated[rng() % data_bytes] = static_cast<char>(round % 2 == 0 ? rng() : rng() % 2 - 1);
    }
    if (round % 7 == 0) mutated.resize(rng() % mutated.size());
    for (const SstEntries& found :
         {WalkToOffset(mutated, data_bytes), WalkToKey(mutated, EncodeKey(KeyOf(2)))}) {
      damaged += found.status.ok() ? 0 : 1;
      for (const SstEntry& entry : found.entries) {
        ASSERT_GE(entry.key.data(), mutated.data());
        ASSERT_LE(entry.value.data() + entry.value.size(), mutated.data() + mutated.size());
      }
    }
  }
  EXPECT_GT(damaged, 1000);
}

}  // namespace
}  // namespace carrel::kvstore
