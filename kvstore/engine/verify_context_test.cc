#include "kvstore/engine/verify_context.h"

#include <filesystem>
#include <random>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

const std::function<bool()> kNever = [] { return false; };

class VerifyContextTest : public testing::TestWithParam<IndexKind> {
 protected:
  void SetUp() override {
    RandomContextSpec spec{.tokens = 500, .seed = TestSeed()};
    spec.index.kind = GetParam();
    spec.index.code_bits = 64;
    spec.summary_rows = 16;
    spec.query_drift = true;
    context_ = std::make_unique<RandomContext>(spec);
    MakeStore(dir_, {context_.get()});
  }
  VerifyReport Verify(bool deep) const {
    const auto store = *Store::Open(folder(), StoreMode::kReadOnly);
    const auto context = store->OpenContext(context_->spec().name);
    CARREL_EXPECT_OK(context);
    return *VerifyContext(**context, deep, kNever);
  }
  std::string folder() const { return dir_ + "/store"; }
  static std::string BytesOf(const uint16_t* rows) {
    return std::string(reinterpret_cast<const char*>(rows), 64);
  }

  const std::string dir_ = FreshTempDir();
  std::unique_ptr<RandomContext> context_;
};

TEST_P(VerifyContextTest, AsPublished_HasNoErrorsBoundOrUnbound) {
  const AttentionShape& shape = context_->spec().shape;
  int64_t payload = 0;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
      payload += int64_t{2} * 500 * 2 * shape.head_dim;
      payload += static_cast<int64_t>(context_->index_blob(layer, head).size() +
                                      context_->summaries(layer, head).size());
    }
    payload += 4 * static_cast<int64_t>(context_->query_drift()[layer.value()].size());
  }
  for (int round = 0; round < 2; ++round) {
    for (const bool deep : {false, true}) {
      const VerifyReport report = Verify(deep);
      EXPECT_EQ(report.error_count, 0) << report.errors[0];
      EXPECT_GE(report.segments, 2 * 2 * (4 + 4 + 1) + 1);
      EXPECT_EQ(report.bytes, deep ? payload : 0);
    }
    if (round == 0) {
      CARREL_ASSERT_OK(MakeUnbound(folder(), context_->spec().name));
    }
  }
}

TEST_P(VerifyContextTest, FlippedBitOfARow_IsFoundDeep) {
  ASSERT_TRUE(FlipBitOf(folder(), BytesOf(context_->values(Layer(1), KvHead(0)) + 200 * 32)));
  EXPECT_EQ(Verify(false).error_count, 0);
  const VerifyReport report = Verify(true);
  EXPECT_EQ(report.error_count, 1);
  EXPECT_THAT(report.errors, testing::ElementsAre(testing::HasSubstr(
                                 "context report: V rows, layer 1, kv_head 0, segment 1")));
}

TEST_P(VerifyContextTest, FlippedBitAnywhereOfALayersValues_IsFound) {
  std::mt19937_64 rng(TestSeed());
  std::vector<std::string> files;
  for (const auto& file : fs::directory_iterator(folder() + "/db")) {
    if (file.path().extension() == ".sst") files.push_back(file.path().string());
  }
  std::sort(files.begin(), files.end());
  files.pop_back();  // the catalog's
  int found = 0;
  constexpr int kRounds = 60;
  for (int round = 0; round < kRounds; ++round) {
    const std::string& file = files[rng() % files.size()];
    const std::string bytes = *ReadFile(file);
    std::string flipped = bytes;
    // Behind the values come RocksDB's own blocks, which nobody reads afterwards.
    const size_t values = bytes.rfind("CSEG");
    const size_t at = 100 + rng() % (values - 100);
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << rng() % 8));
    CARREL_ASSERT_OK(WriteFileAtomically(file, flipped));
    found += Verify(true).error_count > 0 ? 1 : 0;
    CARREL_ASSERT_OK(WriteFileAtomically(file, bytes));
  }
  // Some of it is RocksDB's framing: a checksum of blocks that we do not read.
  EXPECT_GE(found, kRounds - 3);
  EXPECT_EQ(Verify(true).error_count, 0);
}

TEST_P(VerifyContextTest, Cancelled_Ends) {
  const auto store = *Store::Open(folder(), StoreMode::kReadOnly);
  const auto context = *store->OpenContext("report");
  EXPECT_THAT(VerifyContext(*context, true, [] { return true; }),
              StatusIs(absl::StatusCode::kCancelled, "verify"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, VerifyContextTest,
                         testing::Values(IndexKind::kFlat, IndexKind::kCode, IndexKind::kHnsw));

}  // namespace
}  // namespace carrel::kvstore
