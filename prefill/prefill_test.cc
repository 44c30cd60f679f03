#include "prefill/prefill.h"

#include <filesystem>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/storage/store.h"
#include "prefill/staging.h"

namespace carrel::prefill {
namespace {

using kvstore::Kind;

const model::Checkpoint& Demo() {
  static const model::Checkpoint* checkpoint = new model::Checkpoint(
      *model::LoadCheckpoint(std::string(CARREL_SOURCE_DIR) + "/models/demo", nullptr));
  return *checkpoint;
}

std::vector<TokenId> RandomTokens(std::mt19937_64& rng, int64_t n) {
  std::vector<TokenId> tokens(n);
  for (TokenId& token : tokens) token = static_cast<TokenId>(rng() % 2048);
  return tokens;
}

class PrefillTest : public testing::Test {
 protected:
  void SetUp() override {
    rng_.seed(TestSeed());
    folder_ = FreshTempDir();
    config_.store_folder = folder_;
    config_.name = "doc";
  }

  absl::StatusOr<PrefillReport> Run(const std::vector<TokenId>& tokens, int threads = 2) {
    auto store = kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadWrite);
    if (!store.ok()) return store.status();
    ThreadPool pool(threads - 1);
    Progress progress(Progress::Mode::kQuiet);
    return RunPrefill(config_, Demo(), tokens, **store, &pool, progress);
  }

  // Every stored segment of the context, verified, by kind, layer, head and segment.
  std::vector<std::string> Payloads(const std::string& folder) {
    std::vector<std::string> payloads;
    const auto store = kvstore::Store::Open(folder, kvstore::StoreMode::kReadOnly);
    CARREL_EXPECT_OK(store);
    const auto context = (*store)->OpenContext("doc");
    CARREL_EXPECT_OK(context);
    const auto add = [&](int32_t layer, Kind kind, KvHead head) {
      const uint32_t count = *(*context)->SegmentCount(layer, kind, head);
      for (uint32_t i = 0; i < count; ++i) {
        const auto segment = *(*context)->Segment(layer, kind, head, i);
        CARREL_EXPECT_OK(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
        payloads.emplace_back(segment->payload().data(), segment->payload().size());
      }
    };
    add(-1, Kind::kTokenIds, KvHead(0));
    for (int32_t layer = 0; layer < Demo().config.shape.layers; ++layer) {
      for (const Kind kind : {Kind::kKeyRows, Kind::kValueRows, Kind::kSampledQueries, Kind::kIndex,
                              Kind::kSummaries}) {
        for (int32_t head = 0; head < Demo().config.shape.kv_heads; ++head)
          add(layer, kind, KvHead(head));
      }
    }
    return payloads;
  }

  std::mt19937_64 rng_;
  std::string folder_;
  PrefillConfig config_;
};

TEST_F(PrefillTest, AnyThreads_StoreTheSameBytes) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 300);
  config_.index.kind = kvstore::IndexKind::kHnsw;
  config_.segment_tokens = 128;
  config_.summary_rows = 16;
  std::vector<std::vector<std::string>> stored;
  for (int threads : {1, 2, 3}) {
    config_.store_folder = absl::StrCat(folder_, "/", threads);
    const auto report = Run(tokens, threads);
    CARREL_ASSERT_OK(report);
    EXPECT_EQ(report->tokens, 300);
    EXPECT_GT(report->index_bytes, 0);
    EXPECT_GT(report->summary_bytes, 0);
    EXPECT_GT(report->peak_memory_bytes, 0);
    EXPECT_EQ(report->resumed_layers, 0);
    stored.push_back(Payloads(config_.store_folder));
  }
  // Token ids; per layer and head 3 + 3 segments of rows, queries, an index, summaries.
  EXPECT_EQ(stored[0].size(), 1u + 8 * 2 * (3 + 3 + 1 + 1 + 1));
  EXPECT_EQ(stored[0], stored[1]);
  EXPECT_EQ(stored[0], stored[2]);
}

TEST_F(PrefillTest, Manifest_HoldsWhatWasMeasured) {
  config_.summary_rows = 40;
  CARREL_ASSERT_OK(Run(RandomTokens(rng_, 100)));
  const auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadOnly);
  CARREL_ASSERT_OK(store);
  const v1::Manifest manifest = *(*store)->GetManifest("doc");
  EXPECT_EQ(manifest.tokens(), 100);
  EXPECT_EQ(manifest.layer_sizes_size(), 8);
  EXPECT_EQ(manifest.layer_sizes(3).key_bytes(), 100 * 2 * 64 * 2);
  EXPECT_EQ(manifest.summary_rows(), 40u);
  // Of each of 2 heads a header with the centre and 3 clusters.
  EXPECT_EQ(manifest.layer_sizes(3).summary_bytes(), 2 * (4096 + 576));
  EXPECT_EQ(manifest.head_statistics_size(), 64);
  for (const v1::HeadStatistics& head : manifest.head_statistics()) {
    EXPECT_GT(head.entropy_nats(), 0);
    EXPECT_LT(head.entropy_nats(), std::log(100.0));
    EXPECT_GE(head.keys_for_75_mass(), 1);
    EXPECT_LE(head.keys_for_75_mass(), 75);
  }
  EXPECT_GT(manifest.fingerprint().fields_size(), 10);
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/prefill/doc"));
}

TEST_F(PrefillTest, BadInput_IsNamedAndLeavesNothing) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 10);
  const auto refused = [&](const std::vector<TokenId>& input, absl::StatusCode code,
                           const char* text) {
    EXPECT_THAT(Run(input), StatusIs(code, text));
    const auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadOnly);
    EXPECT_TRUE((*store)->List()->empty());
  };
  refused({}, absl::StatusCode::kInvalidArgument, "the document is empty");
  refused({1, 2, 2048}, absl::StatusCode::kInvalidArgument,
          "token id 2048 at index 2 is outside the vocabulary [0, 2048)");
  refused(std::vector<TokenId>(131073, 5), absl::StatusCode::kInvalidArgument,
          "131073 tokens, more than the model's max_position_embeddings=131072");
  for (const char* name : {"", "../x", "-x", ".x", "a b"}) {
    config_.name = name;
    refused(tokens, absl::StatusCode::kInvalidArgument, "context name");
  }
  config_.name = "doc";
  config_.segment_tokens = 100;
  refused(tokens, absl::StatusCode::kInvalidArgument, "segment_tokens=100");
  config_.segment_tokens = 65536;
  config_.sampled_queries = 0;
  refused(tokens, absl::StatusCode::kInvalidArgument, "sampled_queries=0");
  config_.sampled_queries = 256;
  config_.block_tokens = 100;
  refused(tokens, absl::StatusCode::kInvalidArgument, "block_tokens=100");
  config_.block_tokens = 512;
  config_.summary_rows = 3;
  refused(tokens, absl::StatusCode::kInvalidArgument, "summaries=3");
  config_.summary_rows = 0;
  config_.index.kind = kvstore::IndexKind::kHnsw;
  config_.index.m = 1;
  refused(tokens, absl::StatusCode::kInvalidArgument, "m=1");
}

TEST_F(PrefillTest, ExistingName_IsRefusedAndTheContextStays) {
  CARREL_ASSERT_OK(Run(RandomTokens(rng_, 20)));
  const std::vector<std::string> before = Payloads(folder_);
  EXPECT_THAT(Run(RandomTokens(rng_, 30)),
              StatusIs(absl::StatusCode::kAlreadyExists, "context \"doc\" exists already"));
  EXPECT_EQ(Payloads(folder_), before);
}

TEST_F(PrefillTest, InterruptedJobWithOtherSummaries_IsRefused) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 20);
  CARREL_ASSERT_OK(Run(tokens));
  v1::Manifest job;
  {
    const auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadWrite);
    job = *(*store)->GetManifest("doc");
    CARREL_ASSERT_OK((*store)->Delete("doc"));
    job.set_context_id((*store)->AllocateContextId()->value());
  }
  for (const char* name : {"layer_sizes", "head_statistics", "created_unix_s", "prefill_seconds"}) {
    job.GetReflection()->ClearField(&job, v1::Manifest::descriptor()->FindFieldByName(name));
  }
  CARREL_ASSERT_OK(Staging::Open(folder_, "doc")->WriteJob(job));
  config_.summary_rows = 16;
  EXPECT_THAT(Run(tokens), StatusIs(absl::StatusCode::kFailedPrecondition, "summary_rows"));
  config_.summary_rows = PrefillConfig().summary_rows;
  CARREL_EXPECT_OK(Run(tokens));
}

TEST_F(PrefillTest, InterruptedJobOfOtherInput_IsRefusedUntilRestarted) {
  const auto staging = Staging::Open(folder_, "doc");
  CARREL_ASSERT_OK(staging);
  v1::Manifest job;
  job.set_name("doc");
  job.set_token_ids_sha256("of another document");
  CARREL_ASSERT_OK(staging->WriteJob(job));
  const std::vector<TokenId> tokens = RandomTokens(rng_, 20);
  EXPECT_THAT(Run(tokens), StatusIs(absl::StatusCode::kFailedPrecondition, "had another input"));
  config_.restart = true;
  CARREL_EXPECT_OK(Run(tokens));
}

}  // namespace
}  // namespace carrel::prefill
