#include "prefill/recheck.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/storage/store.h"
#include "prefill/layer_forward.h"
#include "prefill/layer_writer.h"
#include "prefill/prefill.h"
#include "prefill/staging.h"

namespace carrel::prefill {
namespace {

namespace fs = std::filesystem;
using EveryLayer = std::vector<LayerRows>;

std::string SourceFolder() { return CARREL_SOURCE_DIR; }

const model::Checkpoint& Demo() {
  static const model::Checkpoint* checkpoint =
      new model::Checkpoint(*model::LoadCheckpoint(SourceFolder() + "/models/demo", nullptr));
  return *checkpoint;
}

class RecheckTest : public testing::Test {
 protected:
  void SetUp() override {
    random_.seed(TestSeed());
    config_.store_folder = FreshTempDir();
    config_.name = "doc";
    config_.summary_rows = 0;
  }

  std::vector<TokenId> RandomTokens(const model::Checkpoint& checkpoint, int64_t n) {
    std::vector<TokenId> tokens(static_cast<size_t>(n));
    for (TokenId& token : tokens) {
      token = static_cast<TokenId>(random_() % static_cast<uint64_t>(checkpoint.config.vocab_size));
    }
    return tokens;
  }

  absl::StatusOr<PrefillReport> Run(const model::Checkpoint& checkpoint,
                                    const std::vector<TokenId>& tokens) {
    ASSIGN_OR_RETURN(const auto store, OpenStore());
    Progress progress(Progress::Mode::kQuiet);
    return RunPrefill(config_, checkpoint, tokens, *store, &pool_, progress);
  }

  absl::StatusOr<std::unique_ptr<kvstore::Store>> OpenStore() const {
    return kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadWrite);
  }

  // A job of which every layer is sealed, as if it had been killed before its end: what the model
  // computes, after `spoil`.
  void SealLayers(const std::vector<TokenId>& tokens, absl::FunctionRef<void(EveryLayer&)> spoil) {
    CARREL_ASSERT_OK(Run(Demo(), tokens));
    v1::Manifest job;
    {
      const auto store = OpenStore();
      job = *(*store)->GetManifest("doc");
      CARREL_ASSERT_OK((*store)->Delete("doc"));
    }
    const kvstore::ContextId id = kvstore::ContextId::Random();
    job.set_context_id(id.Bytes());
    for (const char* name : {"layer_sizes", "head_statistics", "created_unix_s", "prefill_seconds",
                             "segment_digests", "content_id", "head_fidelity"}) {
      const auto* field = v1::Manifest::descriptor()->FindFieldByName(name);
      if (field != nullptr) job.GetReflection()->ClearField(&job, field);
    }
    const auto staging = Staging::Open(config_.store_folder, "doc");
    CARREL_ASSERT_OK(staging->WriteJob(job));
    const auto n = static_cast<int64_t>(tokens.size());
    const auto forward =
        MakeCpuForward(Demo(), n, SamplePositions(n, 256), AttentionConfig(), 64, &pool_);
    EveryLayer every;
    CARREL_ASSERT_OK(forward->Embed(tokens));
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      CARREL_ASSERT_OK(forward->Run(
          layer, false, [](int64_t) { return absl::OkStatus(); },
          [&](LayerRows rows) {
            every.push_back(std::move(rows));
            return absl::OkStatus();
          }));
    }
    spoil(every);
    LayerWriter writer(&*staging, id, shape_, config_.segment_tokens, config_.index, std::nullopt,
                       0, &pool_);
    for (LayerRows& rows : every) CARREL_ASSERT_OK(writer.Submit(std::move(rows)));
    CARREL_ASSERT_OK(writer.Finish());
  }

  // What was spoilt is named, nothing is published, and the same call makes it right.
  void ExpectCaught(const std::vector<TokenId>& tokens, const std::string& message,
                    absl::FunctionRef<void(EveryLayer&)> spoil) {
    SCOPED_TRACE(message);
    SealLayers(tokens, spoil);
    EXPECT_THAT(Run(Demo(), tokens), StatusIs(absl::StatusCode::kDataLoss, message));
    EXPECT_TRUE((*OpenStore())->List()->empty());
    const auto again = Run(Demo(), tokens);
    CARREL_ASSERT_OK(again);
    EXPECT_EQ(again->resumed_layers, 0);
    CARREL_EXPECT_OK((*OpenStore())->Delete("doc"));
  }

  std::vector<RowArray>& RandomKind(LayerRows& rows) {
    return random_() % 2 == 0 ? rows.k : rows.v;
  }

  std::mt19937_64 random_;
  ThreadPool pool_{1};
  PrefillConfig config_;
  const AttentionShape& shape_ = Demo().config.shape;
};

TEST_F(RecheckTest, SealedAsComputed_Passes) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 300);
  SealLayers(tokens, [](EveryLayer&) {});
  const auto report = Run(Demo(), tokens);
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->resumed_layers, shape_.layers);
  EXPECT_EQ(report->recheck_tokens, 16);
  EXPECT_GT(report->recheck_worst, 0);
  EXPECT_LT(report->recheck_worst, 0.6);
}

// Every token of a short document is drawn, so that one row must be noticed.
TEST_F(RecheckTest, OneRow_IsCaught) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 16);
  const int64_t d = shape_.head_dim;
  for (const char* kind : {"sign", "zero", "neighbour"}) {
    const auto layer = static_cast<int32_t>(random_() % static_cast<uint64_t>(shape_.layers));
    const auto head = static_cast<int32_t>(random_() % static_cast<uint64_t>(shape_.kv_heads));
    const auto at = 1 + static_cast<int64_t>(random_() % 15);
    SCOPED_TRACE(absl::StrCat(kind, " layer ", layer, " head ", head, " token ", at));
    ExpectCaught(tokens, absl::StrCat("layer ", layer, " kv_head ", head, " token ", at, ": "),
                 [&](EveryLayer& every) {
                   uint16_t* const row = &RandomKind(every[layer])[head][at * d];
                   for (int64_t c = 0; c < d; ++c) {
                     if (kind[0] == 's') row[c] ^= 0x8000;
                     if (kind[0] == 'z') row[c] = 0;
                     if (kind[0] == 'n') row[c] = row[c - d];
                   }
                 });
  }
}

TEST_F(RecheckTest, SwappedLayersOrHeads_AreCaught) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 200);
  const auto a = static_cast<int32_t>(random_() % static_cast<uint64_t>(shape_.layers - 1));
  ExpectCaught(tokens, absl::StrCat("layer ", a, " kv_head "), [&](EveryLayer& every) {
    std::swap(every[a].k, every[a + 1].k);
    std::swap(every[a].v, every[a + 1].v);
  });
  ExpectCaught(tokens, absl::StrCat("layer ", a, " kv_head "), [&](EveryLayer& every) {
    std::vector<RowArray>& rows = RandomKind(every[a]);
    std::swap(rows[0], rows[1]);
  });
}

// As a missing wait would leave it: the rows of the layer before, or none yet, from a token on.
TEST_F(RecheckTest, HalfALayerThatNeverArrived_IsCaught) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 256);
  const auto layer = 1 + static_cast<int32_t>(random_() % static_cast<uint64_t>(shape_.layers - 1));
  for (const bool stale : {true, false}) {
    ExpectCaught(tokens, absl::StrCat("layer ", layer, " kv_head "), [&](EveryLayer& every) {
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        for (size_t i = every[layer].k[head].size() / 2; i < every[layer].k[head].size(); ++i) {
          every[layer].k[head][i] = stale ? every[layer - 1].k[head][i] : 0;
          every[layer].v[head][i] = stale ? every[layer - 1].v[head][i] : 0;
        }
      }
    });
  }
}

// What the recheck is for: nothing else notices, for every CRC is right.
TEST_F(RecheckTest, SpoiltRowsThatNobodyRechecks_ArePublished) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 16);
  SealLayers(tokens, [&](EveryLayer& every) { std::swap(every[2].k, every[3].k); });
  config_.recheck_tokens = 0;
  CARREL_EXPECT_OK(Run(Demo(), tokens));
}

TEST_F(RecheckTest, FlippedByteOfAFile_IsNamedByItsSegment) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 100);
  SealLayers(tokens, [](EveryLayer&) {});
  const auto staging = Staging::Open(config_.store_folder, "doc");
  const std::string path = staging->SstPath(Layer(3));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  // Rows come first in the file, behind some hundred bytes.
  const auto at = static_cast<std::streamoff>(2000 + random_() % 8000);
  file.seekg(at);
  const char was = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(was ^ 8));
  file.close();
  EXPECT_THAT(Run(Demo(), tokens), StatusIs(absl::StatusCode::kDataLoss, "layer 3"));
  EXPECT_TRUE((*OpenStore())->List()->empty());
  CARREL_EXPECT_OK(Run(Demo(), tokens));
}

TEST_F(RecheckTest, SparseAttentionOrNone_IsNotRechecked) {
  const std::vector<TokenId> tokens = RandomTokens(Demo(), 100);
  config_.attention.kind = AttentionKind::kHip;
  auto report = Run(Demo(), tokens);
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->recheck_tokens, 0);
  config_.attention.kind = AttentionKind::kDense;
  config_.name = "none";
  config_.recheck_tokens = 0;
  report = Run(Demo(), tokens);
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->recheck_tokens, 0);
  EXPECT_EQ(report->recheck_seconds, 0);
  config_.name = "many";
  config_.recheck_tokens = 4097;
  EXPECT_THAT(Run(Demo(), tokens), StatusIs(absl::StatusCode::kInvalidArgument, "recheck=4097"));
}

TEST_F(RecheckTest, KeysBeforeRope_PassAndAreCaught) {
  config_.attention.key_position = KeyPosition::kNone;
  const auto report = Run(Demo(), RandomTokens(Demo(), 300));
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->recheck_tokens, 16);
  EXPECT_LT(report->recheck_worst, 0.6);
}

TEST(DrawPositionsTest, AreDistinctAndOfTheDocument) {
  for (const int64_t all : {1, 5, 16, 17, 1000}) {
    const std::vector<Position> drawn = DrawPositions(all, 16, TestSeed());
    EXPECT_EQ(static_cast<int64_t>(drawn.size()), std::min<int64_t>(all, 16));
    EXPECT_TRUE(std::is_sorted(drawn.begin(), drawn.end()));
    EXPECT_EQ(std::set<Position>(drawn.begin(), drawn.end()).size(), drawn.size());
    EXPECT_GE(drawn.front(), 0);
    EXPECT_LT(drawn.back(), all);
  }
}

// Every family that runs, as small as its goldens: made-up weights.
class RecheckFamilyTest : public RecheckTest, public testing::WithParamInterface<const char*> {};

TEST_P(RecheckFamilyTest, AnyDocument_Passes) {
  std::string folder = SourceFolder() + "/model/testdata/" + GetParam();
  if (const char* shared = std::getenv("CARREL_SHARED"); !fs::exists(folder)) {
    if (shared == nullptr) GTEST_SKIP() << "no shared folder with goldens (CARREL_SHARED)";
    folder = absl::StrCat(shared, "/", GetParam());
  }
  const auto checkpoint = model::LoadCheckpoint(folder, &pool_);
  CARREL_ASSERT_OK(checkpoint);
  for (const int64_t n : {1, 40, 300}) {
    config_.name = absl::StrCat("of-", n);
    const int64_t most = checkpoint->config.max_position_embeddings;
    const auto report = Run(*checkpoint, RandomTokens(*checkpoint, std::min(n, most)));
    CARREL_ASSERT_OK(report);
    EXPECT_EQ(report->recheck_tokens, std::min<int64_t>(n, 16));
    std::cout << GetParam() << ", " << n << " tokens: worst " << report->recheck_worst
              << " of the bound" << std::endl;
    EXPECT_LT(report->recheck_worst, 0.8);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RecheckFamilyTest,
                         testing::Values("families/gemma3", "families/qwen3_moe",
                                         "families/qwen3_moe_mixed", "families/yarn",
                                         "qwen3moe/model.gguf", "golden-models/llama2-mha-linear",
                                         "golden-models/llama3.1", "golden-models/mistral",
                                         "golden-models/qwen2", "golden-models/qwen3"));

}  // namespace
}  // namespace carrel::prefill
