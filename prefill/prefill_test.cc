#include "prefill/prefill.h"

#include <filesystem>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kernels/layer/rope/rope.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/storage/store.h"
#include "model/cpu_backend.h"
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
      add(layer, Kind::kQueryDrift, KvHead(0));
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
  // Token ids; per layer and head 3 + 3 segments of rows, queries, an index, summaries; the drift of
  // all layers but the first.
  EXPECT_EQ(stored[0].size(), 1u + 8 * 2 * (3 + 3 + 1 + 1 + 1) + 7);
  EXPECT_EQ(stored[0], stored[1]);
  EXPECT_EQ(stored[0], stored[2]);
}

// Many threads take more tokens through a layer together, each fewer at a time.
TEST_F(PrefillTest, ManyThreads_StoreTheSameBytes) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 1100 + static_cast<int64_t>(rng_() % 60));
  config_.summary_rows = 16;
  std::vector<std::vector<std::string>> stored;
  for (int threads : {1, 8, 16}) {
    config_.store_folder = absl::StrCat(folder_, "/", threads);
    CARREL_ASSERT_OK(Run(tokens, threads));
    stored.push_back(Payloads(config_.store_folder));
  }
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

// The state that enters each layer, and what each leaves behind.
struct EveryLayer {
  std::vector<std::vector<float>> entering, before;
  std::vector<LayerRows> rows;
};

// The last `probe` of the tokens are no document's.
EveryLayer RunLayers(const std::vector<TokenId>& tokens, ThreadPool* pool, int64_t probe = 0) {
  const auto n = static_cast<int64_t>(tokens.size()) - probe;
  const auto forward =
      MakeCpuForward(Demo(), {n, probe, SamplePositions(n, 256), {}, {}}, 64, pool);
  EveryLayer every;
  CARREL_EXPECT_OK(forward->Embed(tokens));
  for (Layer layer(0); layer.value() < Demo().config.shape.layers; layer = layer.next()) {
    const auto state = forward->Hidden();
    CARREL_EXPECT_OK(state);
    every.entering.emplace_back(state->all.begin(), state->all.end());
    every.before.emplace_back(state->before.begin(), state->before.end());
    CARREL_EXPECT_OK(forward->Run(
        layer, false, [](int64_t) { return absl::OkStatus(); },
        [&](LayerRows rows) {
          every.rows.push_back(std::move(rows));
          return absl::OkStatus();
        }));
  }
  return every;
}

TEST_F(PrefillTest, StoredDrift_IsWhatApproximateQueriesLack) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 300);
  config_.sampled_queries = 256;
  CARREL_ASSERT_OK(Run(tokens));
  const auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadOnly);
  const auto context = (*store)->OpenContext("doc");
  CARREL_ASSERT_OK(context);
  const model::ModelConfig& config = Demo().config;
  const AttentionShape& shape = config.shape;
  const int64_t width = int64_t{shape.q_heads} * shape.head_dim;
  std::vector<float> turn_back = model::RopeInvFreq(config.rope, shape.head_dim);
  for (float& frequency : turn_back) frequency = -frequency;
  ThreadPool pool(1);
  const EveryLayer every = RunLayers(tokens, &pool);
  const auto backend = model::MakeCpuBackend(config, Demo().weights, &pool);
  EXPECT_TRUE(kvstore::ReadQueryDrift(**context, Layer(0))->empty());
  for (Layer layer(1); layer.value() < shape.layers; layer = layer.next()) {
    // The stored samples are the very tokens: true queries where they stand in the document.
    std::vector<double> sum(static_cast<size_t>(width));
    int64_t samples = 0;
    std::vector<kvstore::SampledQueries> queries;
    for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
      queries.push_back(*kvstore::ReadSampledQueries(**context, layer, head));
    }
    for (const Position at : queries[0].positions) {
      std::vector<float> lack(static_cast<size_t>(width));
      const float* hidden = &every.entering[layer.value() - 1][at * config.hidden_size];
      CARREL_ASSERT_OK(backend->ProjectQuery(layer, hidden, 1, at, lack.data()));
      for (int64_t h = 0; h < shape.q_heads; ++h) {
        const float* q = queries[h / shape.group()].Query(samples, h % shape.group());
        float* of_head = &lack[h * shape.head_dim];
        for (int64_t c = 0; c < shape.head_dim; ++c) of_head[c] = q[c] - of_head[c];
      }
      kernels::RefRope(lack.data(), 1, shape.q_heads, shape.head_dim, at, turn_back.data());
      for (int64_t c = 0; c < width; ++c) sum[c] += lack[c];
      ++samples;
    }
    ASSERT_EQ(samples, 256);
    std::vector<float> expected;
    for (const double x : sum) expected.push_back(static_cast<float>(x / 256));
    const auto drift = kvstore::ReadQueryDrift(**context, layer);
    CARREL_ASSERT_OK(drift);
    EXPECT_LE(RelativeError(*drift, expected), 1e-4) << "layer " << layer;
    EXPECT_EQ((*context)->manifest().layer_sizes(layer.value()).query_drift_bytes(), width * 4);
  }
}

TEST_F(PrefillTest, LayersFromAKeptState_HaveTheSameDrift) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 100 + static_cast<int64_t>(rng_() % 300));
  const auto n = static_cast<int64_t>(tokens.size());
  ThreadPool pool(1);
  const EveryLayer every = RunLayers(tokens, &pool);
  const auto forward = MakeCpuForward(Demo(), {n, 0, SamplePositions(n, 256), {}, {}}, 64, &pool);
  const Layer first(1 + static_cast<int32_t>(rng_() % 6));
  CARREL_ASSERT_OK(
      forward->SetHidden(first, {every.entering[first.value()], every.before[first.value()]}));
  for (const Layer layer : {first, first.next()}) {
    std::vector<float> drift;
    CARREL_ASSERT_OK(forward->Run(
        layer, false, [](int64_t) { return absl::OkStatus(); },
        [&](LayerRows rows) {
          drift = std::move(rows.query_drift);
          return absl::OkStatus();
        }));
    EXPECT_EQ(drift, every.rows[layer.value()].query_drift) << "layer " << layer;
    EXPECT_FALSE(drift.empty());
  }
}

// Rows of one head, from token `begin` on.
std::vector<uint16_t> RowsOf(const RowArray& rows, int64_t begin) {
  const int64_t d = Demo().config.shape.head_dim;
  return {rows.data() + begin * d, rows.data() + rows.size()};
}

// A probe sees the document and itself as if it were the document's end, and changes no bit before it.
TEST_F(PrefillTest, Probe_ChangesNoBitOfTheDocument_AndIsWhatATokenThereWouldBe) {
  ThreadPool pool(1);
  for (const int64_t n : {63 + static_cast<int64_t>(rng_() % 200), int64_t{128}}) {
    SCOPED_TRACE(n);
    const int64_t behind = 1 + static_cast<int64_t>(rng_() % 90);
    const std::vector<TokenId> all = RandomTokens(rng_, n + behind);
    const EveryLayer document = RunLayers({all.begin(), all.begin() + n}, &pool);
    const EveryLayer probed = RunLayers(all, &pool, behind);
    const EveryLayer longer = RunLayers(all, &pool);
    for (size_t layer = 0; layer < document.rows.size(); ++layer) {
      const LayerRows &with = probed.rows[layer], &without = document.rows[layer];
      EXPECT_EQ(with.queries, without.queries);
      EXPECT_EQ(with.query_drift, without.query_drift);
      EXPECT_EQ(with.sample_positions, without.sample_positions);
      EXPECT_EQ(without.probe.tokens, 0);
      ASSERT_EQ(with.probe.tokens, behind);
      for (size_t head = 0; head < with.k.size(); ++head) {
        EXPECT_EQ(RowsOf(with.k[head], 0), RowsOf(without.k[head], 0));
        EXPECT_EQ(RowsOf(with.v[head], 0), RowsOf(without.v[head], 0));
        const auto near = [](const std::vector<uint16_t>& is, const std::vector<uint16_t>& wanted) {
          std::vector<float> a(is.size()), b(wanted.size());
          Bf16ToFloat(is, a.data());
          Bf16ToFloat(wanted, b.data());
          return RelativeError(a, b);
        };
        EXPECT_LT(near(with.probe.k[head], RowsOf(longer.rows[layer].k[head], n)), 5e-3);
        EXPECT_LT(near(with.probe.v[head], RowsOf(longer.rows[layer].v[head], n)), 5e-3);
        const std::vector<Position>& sampled = longer.rows[layer].sample_positions;
        const auto width = static_cast<int64_t>(Demo().config.shape.group()) * 64;
        for (size_t i = 0; i < sampled.size(); ++i) {
          if (sampled[i] < n) continue;
          const float* const q = &longer.rows[layer].queries[head][i * static_cast<size_t>(width)];
          const float* const p = &with.probe.queries[head][(sampled[i] - n) * width];
          EXPECT_LT(RelativeError({p, static_cast<size_t>(width)}, {q, static_cast<size_t>(width)}),
                    1e-3);
        }
      }
    }
  }
}

TEST_F(PrefillTest, Probe_IsMeasuredAndOtherwiseLeavesNoTrace) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 1100);
  config_.index.kind = kvstore::IndexKind::kHnsw;
  std::vector<std::vector<std::string>> stored;
  std::vector<v1::Manifest> manifests;
  for (const bool probed : {false, true}) {
    config_.store_folder = absl::StrCat(folder_, "/", probed);
    config_.probe = probed ? RandomTokens(rng_, 200) : std::vector<TokenId>();
    CARREL_ASSERT_OK(Run(tokens));
    stored.push_back(Payloads(config_.store_folder));
    const auto store = kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadOnly);
    manifests.push_back(*(*store)->GetManifest("doc"));
  }
  // Of summaries the head says what share of the spread counts, which is measured.
  ASSERT_EQ(stored[0].size(), stored[1].size());
  int differing = 0;
  for (size_t i = 0; i < stored[0].size(); ++i) {
    ASSERT_EQ(stored[0][i].size(), stored[1][i].size());
    differing += stored[0][i] != stored[1][i] ? 1 : 0;
  }
  EXPECT_LE(differing, 8 * 2);
  EXPECT_EQ(manifests[0].token_ids_sha256(), manifests[1].token_ids_sha256());
  EXPECT_EQ(manifests[1].tokens(), 1100);
  EXPECT_FALSE(manifests[0].has_probe());
  EXPECT_EQ(manifests[1].probe().token_ids_size(), 48);
  EXPECT_EQ(manifests[0].head_fidelity(0).probe_queries(), 0u);
  EXPECT_GT(manifests[1].head_fidelity(0).probe_queries(), 0u);
}

TEST_F(PrefillTest, InterruptedJob_GoesOnWithTheProbeThatItBeganWith) {
  const std::vector<TokenId> tokens = RandomTokens(rng_, 1100), first = RandomTokens(rng_, 48);
  const auto manifest = [&] {
    const auto store = kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadOnly);
    return *(*store)->GetManifest("doc");
  };
  config_.probe = first;
  config_.store_folder = folder_ + "/whole";
  CARREL_ASSERT_OK(Run(tokens));
  const v1::Manifest whole = manifest();
  const std::vector<std::string> stored = Payloads(config_.store_folder);
  config_.store_folder = folder_ + "/resumed";
  int blocks = 0;
  config_.wanted = [&] { return ++blocks < 14; };  // in the fifth layer, of three blocks each
  EXPECT_THAT(Run(tokens), StatusIs(absl::StatusCode::kCancelled, "cancelled"));
  config_.wanted = nullptr;
  config_.probe = RandomTokens(rng_, 30);
  const auto report = Run(tokens);
  CARREL_ASSERT_OK(report);
  EXPECT_GT(report->resumed_layers, 0);
  EXPECT_EQ(Payloads(config_.store_folder), stored);
  const v1::Manifest resumed = manifest();
  EXPECT_EQ(resumed.probe().SerializeAsString(), whole.probe().SerializeAsString());
  ASSERT_EQ(resumed.head_fidelity_size(), whole.head_fidelity_size());
  for (int i = 0; i < whole.head_fidelity_size(); ++i) {
    EXPECT_EQ(resumed.head_fidelity(i).SerializeAsString(),
              whole.head_fidelity(i).SerializeAsString());
  }
}

// A document that fits without a probe fits; one that is attended whole needs none.
TEST_F(PrefillTest, Probe_IsCutWhereTheModelEnds_AndLeftOutOfShortDocuments) {
  config_.probe = RandomTokens(rng_, 200);
  model::Checkpoint checkpoint = Demo();
  checkpoint.config.max_position_embeddings = 1100;
  const auto probe_of = [&](int64_t tokens) {
    config_.name = absl::StrCat("d", tokens);
    auto store = kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadWrite);
    ThreadPool pool(1);
    Progress progress(Progress::Mode::kQuiet);
    CARREL_EXPECT_OK(
        RunPrefill(config_, checkpoint, RandomTokens(rng_, tokens), **store, &pool, progress));
    return (*store)->GetManifest(config_.name)->probe().token_ids_size();
  };
  EXPECT_EQ(probe_of(1099), 1);
  EXPECT_EQ(probe_of(1080), 20);
  EXPECT_EQ(probe_of(1030), 48);
  EXPECT_EQ(probe_of(300), 0);
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
  refused(std::vector<TokenId>(131072, 5), absl::StatusCode::kInvalidArgument,
          "131072 tokens; with one of a prompt: 131073 tokens exceed the model's "
          "max_position_embeddings=131072");
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
  config_.sampled_queries.reset();
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
    job.set_context_id(kvstore::ContextId::Random().Bytes());
  }
  for (const char* name : {"layer_sizes", "head_statistics", "created_unix_s", "prefill_seconds",
                           "segment_digests", "content_id"}) {
    job.GetReflection()->ClearField(&job, v1::Manifest::descriptor()->FindFieldByName(name));
  }
  CARREL_ASSERT_OK(Staging::Open(folder_, "doc")->WriteJob(job));
  config_.summary_rows = 16;
  EXPECT_THAT(Run(tokens), StatusIs(absl::StatusCode::kFailedPrecondition, "summary_rows"));
  config_.summary_rows = PrefillConfig().summary_rows;
  CARREL_EXPECT_OK(Run(tokens));
}

TEST_F(PrefillTest, InterruptedJobOfOtherInput_IsRefusedUntilRestarted) {
  v1::Manifest job;
  job.set_name("doc");
  job.set_token_ids_sha256("of another document");
  CARREL_ASSERT_OK(Staging::Open(folder_, "doc")->WriteJob(job));
  const std::vector<TokenId> tokens = RandomTokens(rng_, 20);
  EXPECT_THAT(Run(tokens), StatusIs(absl::StatusCode::kFailedPrecondition, "had another input"));
  config_.restart = true;
  CARREL_EXPECT_OK(Run(tokens));
}

}  // namespace
}  // namespace carrel::prefill
