// The master test: with every zone row retrieved, decoding equals dense attention; whatever travels
// and whatever is asked ahead.
#include <map>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/storage/store.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::Prefetch;
using decoder::Want;
using testing_world::DemoCheckpoint;

// Dense attention in double precision over the stored rows and every new row, per layer; collects
// error and norm.
class DenseReference {
 public:
  DenseReference(const std::string& store_folder, const std::string& context)
      : store_(*kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadOnly)) {
    stored_ = *store_->OpenContext(context);
    shape_ = DemoCheckpoint().config.shape;
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
        k_.push_back(Widen(*kvstore::Rows::OpenKeys(*stored_, layer, head)));
        v_.push_back(Widen(*kvstore::Rows::OpenValues(*stored_, layer, head)));
      }
    }
    errors_.resize(shape_.layers);
  }

  void Observe(const model::AttentionInput& input, const float* attended) {
    const int64_t d = shape_.head_dim, group = shape_.group();
    auto& [error, norm] = errors_[input.layer.value()];
    for (int64_t i = 0; i < input.n; ++i) {
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        std::vector<float>& k = k_[input.layer.value() * shape_.kv_heads + h];
        std::vector<float>& v = v_[input.layer.value() * shape_.kv_heads + h];
        k.insert(k.end(), input.k + (i * shape_.kv_heads + h) * d,
                 input.k + (i * shape_.kv_heads + h + 1) * d);
        v.insert(v.end(), input.v + (i * shape_.kv_heads + h) * d,
                 input.v + (i * shape_.kv_heads + h + 1) * d);
        const int64_t rows = static_cast<int64_t>(k.size()) / d;
        ASSERT_EQ(rows, input.first_position + i + 1);
        for (int64_t g = 0; g < group; ++g) {
          const int64_t q_head = i * shape_.q_heads + h * group + g;
          const std::vector<double> expected = Attend(input.q + q_head * d, k, v, rows);
          for (int64_t c = 0; c < d; ++c) {
            const double difference = attended[q_head * d + c] - expected[c];
            error += difference * difference;
            norm += expected[c] * expected[c];
          }
        }
      }
    }
  }

  double RelativeErrorOf(int32_t layer) const {
    return std::sqrt(errors_[layer].first / errors_[layer].second);
  }

 private:
  static std::vector<float> Widen(const kvstore::Rows& rows) {
    CARREL_CHECK(rows.Verify({0, rows.count()}).ok());
    std::vector<float> out(static_cast<size_t>(rows.count() * rows.head_dim()));
    rows.ForEachPiece({0, rows.count()}, [&](Position first, const void* address, int64_t n) {
      WidenToFloat(DType::kBf16, address, n * rows.head_dim(), &out[first * rows.head_dim()]);
    });
    return out;
  }

  std::vector<double> Attend(const float* q, const std::vector<float>& k,
                             const std::vector<float>& v, int64_t rows) const {
    const int64_t d = shape_.head_dim;
    std::vector<double> scores(rows), out(d, 0.0);
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < rows; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += double{q[c]} * k[j * d + c];
      scores[j] = dot / std::sqrt(static_cast<double>(d));
      max = std::max(max, scores[j]);
    }
    for (int64_t j = 0; j < rows; ++j) {
      const double weight = std::exp(scores[j] - max);
      sum += weight;
      for (int64_t c = 0; c < d; ++c) out[c] += weight * v[j * d + c];
    }
    for (double& x : out) x /= sum;
    return out;
  }

  std::unique_ptr<kvstore::Store> store_;
  std::shared_ptr<const kvstore::StoredContext> stored_;
  AttentionShape shape_;
  std::vector<std::vector<float>> k_, v_;  // [layers * kv_heads]
  std::vector<std::pair<double, double>> errors_;
};

struct Case {
  Want want;
  Prefetch prefetch;
  int64_t sink, local;
};

class MasterTest : public testing::TestWithParam<kvstore::IndexKind> {
 protected:
  // Two segments, so that pieces are merged.
  void SetUp() override {
    folder_ = FreshTempDir();
    const auto tokens = testing_world::DocumentTokens("registry-512");
    CARREL_ASSERT_OK(tokens);
    kvstore::IndexParams index;
    index.kind = GetParam();
    CARREL_ASSERT_OK(
        testing_world::PrefillContext(folder_, "doc", *tokens, index, /*segment_tokens=*/256));
  }
  std::string folder_;
};

TEST_P(MasterTest, TopKAll_EqualsDenseAttentionWhateverTravels) {
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  const testing_world::Question& question = (*questions)[1];
  for (const Want want : {Want::kRows, Want::kValues, Want::kAttend}) {
    for (const Prefetch prefetch : {Prefetch::kOff, Prefetch::kSpeculative, Prefetch::kVerified}) {
      for (const auto& [sink, local] : {std::pair<int64_t, int64_t>{4, 64}, {0, 0}, {300, 400}}) {
        SCOPED_TRACE(absl::StrCat("want ", static_cast<int>(want), " prefetch ",
                                  static_cast<int>(prefetch), " sink ", sink, " local ", local));
        decoder::RetrievalConfig config;
        config.selection = select::All();
        config.dense_layers = 0;
        config.want = want;
        config.prefetch = prefetch;
        config.sink = sink;
        config.local = local;
        auto decoder = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
        CARREL_ASSERT_OK(decoder);
        DenseReference reference(folder_, "doc");
        (**decoder)->set_observer([&](const model::AttentionInput& input, const float* attended) {
          reference.Observe(input, attended);
        });
        const auto result = (**decoder)->Generate(question.prompt, decoder::GenerateOptions());
        CARREL_ASSERT_OK(result);
        EXPECT_EQ(result->ids, question.dense_ids);
        EXPECT_EQ(result->stop, decoder::StopReason::kEos);
        for (int32_t layer = 0; layer < DemoCheckpoint().config.shape.layers; ++layer)
          EXPECT_LE(reference.RelativeErrorOf(layer), 1e-4) << "layer " << layer;
      }
    }
  }
}

// Candidates that travelled are chosen from here, those that stayed at the store there: alike, since
// both weigh them against the whole zone.
TEST_P(MasterTest, CandidatesAskedAhead_AreChosenAlikeHereAndAtTheStore) {
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  std::vector<std::vector<float>> logits;
  for (const Want want : {Want::kRows, Want::kValues, Want::kAttend}) {
    decoder::RetrievalConfig config;
    config.selection = select::TopK{24};
    config.dense_layers = 0;
    config.want = want;
    config.prefetch = Prefetch::kSpeculative;
    config.estimate = decoder::Estimate::kOff;
    auto decoder = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
    CARREL_ASSERT_OK(decoder);
    decoder::GenerateOptions options;
    options.keep_logits = true;
    options.max_tokens = 4;
    options.ignore_eos = true;
    logits.emplace_back();
    for (const testing_world::Question& question : *questions) {
      const auto result = (**decoder)->Generate(question.prompt, options);
      CARREL_ASSERT_OK(result);
      logits.back().insert(logits.back().end(), result->logits.begin(), result->logits.end());
    }
  }
  EXPECT_LE(RelativeError(logits[0], logits[2]), 5e-3) << "rows";
  EXPECT_LE(RelativeError(logits[1], logits[2]), 5e-3) << "values";
}

TEST_P(MasterTest, RowCache_ChangesNoBit) {
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  for (const Prefetch prefetch : {Prefetch::kOff, Prefetch::kSpeculative, Prefetch::kVerified}) {
    std::vector<float> without;
    int64_t bytes_without = 0;
    for (const int64_t rows : {0, 64, 200}) {
      SCOPED_TRACE(absl::StrCat("prefetch ", static_cast<int>(prefetch), " slots ", rows));
      decoder::RetrievalConfig config;
      config.selection = select::TopK{32};
      config.dense_layers = 1;
      config.want = Want::kRows;
      config.prefetch = prefetch;
      const AttentionShape& shape = DemoCheckpoint().config.shape;
      config.row_cache_bytes =
          rows * (shape.layers - 1) * shape.kv_heads * (int64_t{shape.head_dim} * 4 + 64);
      auto decoder = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
      CARREL_ASSERT_OK(decoder);
      decoder::GenerateOptions options;
      options.keep_logits = true;
      std::vector<float> logits;
      for (size_t i = 0; i < 2; ++i) {
        const auto result = (**decoder)->Generate((*questions)[i].prompt, options);
        CARREL_ASSERT_OK(result);
        logits.insert(logits.end(), result->logits.begin(), result->logits.end());
      }
      int64_t bytes = 0, hits = 0;
      for (const decoder::LayerStatistics& layer : (**decoder)->statistics().layers) {
        if (select::IsAll(layer.selection)) continue;
        bytes += layer.bytes_received;
        hits += layer.bank.hits;
      }
      if (rows == 0) {
        without = logits;
        bytes_without = bytes;
        EXPECT_EQ(hits, 0);
        continue;
      }
      EXPECT_EQ(logits, without);
      EXPECT_GT(hits, 0);
      EXPECT_LT(bytes, bytes_without);
    }
  }
}

TEST_P(MasterTest, MeasuringAndBudgets_ReportWhatHappened) {
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  for (const Want want : {Want::kRows, Want::kValues, Want::kAttend}) {
    for (const Prefetch prefetch : {Prefetch::kOff, Prefetch::kSpeculative, Prefetch::kVerified}) {
      SCOPED_TRACE(
          absl::StrCat("want ", static_cast<int>(want), " prefetch ", static_cast<int>(prefetch)));
      decoder::RetrievalConfig config;
      config.selection = select::TopK{32};
      config.dense_layers = 1;
      config.want = want;
      config.prefetch = prefetch;
      config.budget = decoder::Budget::kLinear;
      config.measure = true;
      auto decoder = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
      CARREL_ASSERT_OK(decoder);
      CARREL_ASSERT_OK((**decoder)->Generate((*questions)[0].prompt, decoder::GenerateOptions()));
      const decoder::Statistics statistics = (**decoder)->statistics();
      EXPECT_GT(statistics.bytes_received, 0);
      for (size_t i = 0; i < statistics.layers.size(); ++i) {
        SCOPED_TRACE(absl::StrCat("layer ", i));
        const decoder::LayerStatistics& layer = statistics.layers[i];
        EXPECT_GT(layer.tokens, 0);
        EXPECT_GT(layer.bytes_received, 0);
        EXPECT_GT(layer.candidates, 0);
        EXPECT_GT(layer.mass.value(), 0);
        EXPECT_LE(layer.mass.value(), 1.001);
        EXPECT_GE(layer.attended_mass.value(), 0);
        EXPECT_LE(layer.attended_mass.value(), 1.001);
        if (i == 0) {
          EXPECT_TRUE(select::IsAll(layer.selection));
          EXPECT_NEAR(layer.mass.value(), 1, 1e-6);
        } else {
          EXPECT_EQ(layer.cosine.count > 0, prefetch != Prefetch::kOff);
          EXPECT_EQ(layer.hit_rate.count > 0, prefetch != Prefetch::kOff);
          if (prefetch != Prefetch::kOff) {
            EXPECT_GT(layer.hit_rate.value(), 0.3);
            EXPECT_EQ(layer.kept_rate.count > 0, want != Want::kRows);
            EXPECT_LE(layer.kept_rate.value(), layer.hit_rate.value());
            EXPECT_EQ(layer.prefetched + layer.verified_again, layer.tokens);
          }
          if (prefetch == Prefetch::kSpeculative) {
            EXPECT_EQ(layer.verified_again, 0);
          }
        }
      }
    }
  }
}

TEST_P(MasterTest, ZoneInThisHost_EverySelectorWithEveryRow_EqualsDenseAttention) {
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  const testing_world::Question& question = (*questions)[1];
  for (const char* method :
       {"exact", "hip", "infinitehip", "hash", "channels", "pages", "landmarks"}) {
    for (const auto& [sink, local] : {std::pair<int64_t, int64_t>{4, 64}, {0, 0}, {300, 400}}) {
      SCOPED_TRACE(absl::StrCat(method, " sink ", sink, " local ", local));
      decoder::RetrievalConfig config;
      config.selection = select::All();
      config.dense_layers = 0;
      config.sink = sink;
      config.local = local;
      config.zone = decoder::HostZoneOptions{*decoder::ParseSelector(method)};
      auto decoder = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
      CARREL_ASSERT_OK(decoder);
      DenseReference reference(folder_, "doc");
      (**decoder)->set_observer([&](const model::AttentionInput& input, const float* attended) {
        reference.Observe(input, attended);
      });
      const auto result = (**decoder)->Generate(question.prompt, decoder::GenerateOptions());
      CARREL_ASSERT_OK(result);
      EXPECT_EQ(result->ids, question.dense_ids);
      for (int32_t layer = 0; layer < DemoCheckpoint().config.shape.layers; ++layer)
        EXPECT_LE(reference.RelativeErrorOf(layer), 1e-4) << "layer " << layer;
    }
  }
}

// The exact method finds what the store's flat index finds: the same tokens and the same mass.
TEST_P(MasterTest, ZoneInThisHost_Exact_IsTheStoresFlatSearch) {
  if (GetParam() != kvstore::IndexKind::kFlat) GTEST_SKIP() << "hnsw may find other rows";
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  decoder::RetrievalConfig config;
  config.selection = select::TopK{16};
  config.dense_layers = 1;
  config.measure = true;
  config.estimate = decoder::Estimate::kOff;
  auto at_store = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
  CARREL_ASSERT_OK(at_store);
  config.zone = decoder::HostZoneOptions();
  auto here = testing_world::EmbeddedDecoder::Open(folder_, "doc", config);
  CARREL_ASSERT_OK(here);
  for (const testing_world::Question& question : *questions) {
    const auto from_store = (**at_store)->Generate(question.prompt, decoder::GenerateOptions());
    const auto from_here = (**here)->Generate(question.prompt, decoder::GenerateOptions());
    CARREL_ASSERT_OK(from_store);
    CARREL_ASSERT_OK(from_here);
    EXPECT_EQ(from_here->ids, from_store->ids);
  }
  const decoder::Statistics a = (**at_store)->statistics(), b = (**here)->statistics();
  for (size_t i = 0; i < a.layers.size(); ++i) {
    EXPECT_EQ(a.layers[i].rows_attended, b.layers[i].rows_attended) << "layer " << i;
    EXPECT_NEAR(a.layers[i].mass.value(), b.layers[i].mass.value(), 1e-4) << "layer " << i;
    EXPECT_NEAR(a.layers[i].output_error.value(), b.layers[i].output_error.value(), 1e-3)
        << "layer " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, MasterTest,
                         testing::Values(kvstore::IndexKind::kFlat, kvstore::IndexKind::kHnsw),
                         [](const auto& info) {
                           return std::string(kvstore::IndexKindName(info.param));
                         });

}  // namespace
}  // namespace carrel
