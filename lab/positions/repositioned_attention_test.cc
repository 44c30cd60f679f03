#include "decoder/zone/repositioned_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/dtype.h"
#include "common/test_util.h"
#include "decoder/select/row_selector.h"
#include "decoder/zone/make_zone.h"
#include "kernels/layer/rope/rope.h"
#include "kernels/layer/rope/rope_table.h"
#include "lab/methods/infinite_hip_selector.h"
#include "lab/methods/options.h"

namespace carrel::decoder {
namespace {

// Random rows of every head in one segment; keys are before RoPE.
class PlainRows final : public HostRows {
 public:
  PlainRows(std::mt19937_64& rng, const AttentionShape& shape, int64_t tokens)
      : shape_(shape), tokens_(tokens) {
    for (int i = 0; i < shape.layers * shape.kv_heads; ++i) {
      k_.push_back(Rounded(RandomNormal(rng, tokens * shape.head_dim, 2.0f)));
      v_.push_back(Rounded(RandomNormal(rng, tokens * shape.head_dim)));
    }
    for (size_t i = 0; i < k_.size(); ++i) {
      HeadView rows;
      rows.k_segments = {reinterpret_cast<const char*>(k_[i].data())};
      rows.v_segments = {reinterpret_cast<const char*>(v_[i].data())};
      rows.segment_rows = tokens;
      rows.row_bytes = 2 * shape.head_dim;
      heads_.push_back(rows);
    }
  }
  int64_t tokens() const override { return tokens_; }
  const HeadView& At(Layer layer, KvHead head) const override {
    return heads_[static_cast<size_t>(layer.value() * shape_.kv_heads + head.value())];
  }
  absl::StatusOr<std::vector<float>> SampledQueries(Layer, KvHead) const override {
    return absl::NotFoundError("none");
  }
  absl::StatusOr<HeadCodes> StoredCodes(Layer, KvHead) const override {
    return absl::NotFoundError("none");
  }
  std::vector<float> Row(const void* row) const {
    std::vector<float> wide(static_cast<size_t>(shape_.head_dim));
    WidenToFloat(DType::kBf16, row, shape_.head_dim, wide.data());
    return wide;
  }

 private:
  static std::vector<uint16_t> Rounded(const std::vector<float>& x) {
    std::vector<uint16_t> rounded(x.size());
    FloatToBf16(x, rounded.data());
    return rounded;
  }
  const AttentionShape shape_;
  const int64_t tokens_;
  std::vector<std::vector<uint16_t>> k_, v_;
  std::vector<HeadView> heads_;
};

class RepositionedAttentionTest : public testing::TestWithParam<const char*> {
 protected:
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(rng_() % static_cast<uint64_t>(bound));
  }
  static constexpr int64_t kNew = 5;

  void SetUp() override {
    model_.shape = {.layers = 5, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
    model_.rope.theta = 10000;
    model_.max_position_embeddings = 4096;
    inv_freq_ = model::RopeInvFreq(model_.rope, 16);
    config_.zone = HostZoneOptions{*ParseSelector(GetParam())};
    config_.rope = Rope::kInfiniteHip;
    config_.dense_layers = 0;
    config_.sink = 3;
    config_.local = 7;
  }

  absl::StatusOr<std::unique_ptr<ZoneAttention>> Make(RowRange zone, const Window& window,
                                                      std::shared_ptr<const HostRows> rows,
                                                      ThreadPool& pool) {
    const OpenedContext context = {.config = config_,
                                   .selections = LayerSelections(config_, 5, zone.rows()),
                                   .shape = model_.shape,
                                   .zone = zone,
                                   .pool = &pool,
                                   .rows = std::move(rows)};
    return MakeHostZone(std::get<HostZoneOptions>(config_.zone), context,
                        *RepositionedAttention::Create(context, model_, window));
  }
  // A context of `tokens` and kNew tokens after it, of one layer; every output against plain loops
  // over the rows that `chosen` names, in order, at consecutive positions.
  void Check(int64_t tokens, Layer layer, bool reading_prompt) {
    const PlainRows* rows = new PlainRows(rng_, model_.shape, tokens);
    const std::shared_ptr<const HostRows> owned(rows);
    const RowRange zone{config_.sink, tokens - config_.local};
    ThreadPool pool(1);
    Window window(model_.shape);
    auto attention = Make(zone, window, owned, pool);
    CARREL_ASSERT_OK(attention);
    (*attention)->set_reading_prompt(reading_prompt);
    Partial partial;
    const std::vector<float> q = RandomNormal(rng_, kNew * 4 * 16),
                             k = RandomNormal(rng_, kNew * 2 * 16, 2.0f),
                             v = RandomNormal(rng_, kNew * 2 * 16);
    std::vector<float> attended(q.size()), again(q.size());
    for (std::vector<float>* out : {&attended, &again}) {
      (*attention)->Cancel();
      window.Truncate();
      // In two blocks if a prompt is read, token by token otherwise.
      for (int64_t at = 0; at < kNew;) {
        const int64_t n = !reading_prompt ? 1 : std::min<int64_t>(3, kNew - at);
        const float* const queries = &q[static_cast<size_t>(at * 64)];
        window.Append(layer, &k[static_cast<size_t>(at * 32)], &v[static_cast<size_t>(at * 32)], n);
        CARREL_ASSERT_OK((*attention)->Start(layer, queries, n));
        CARREL_ASSERT_OK((*attention)->Finish(layer, queries, n, partial));
        std::copy(partial.out.begin(), partial.out.end(), out->begin() + at * 64);
        at += n;
      }
    }
    EXPECT_EQ(attended, again) << "a new sequence";
    const auto selector = *MakeRowSelector(*SelectorOf(config_), model_.shape, zone, *rows, &pool);
    const kernels::RopeTable table(inv_freq_, model_.max_position_embeddings);
    const int64_t budget = Budgets(LayerSelections(config_, 5, zone.rows()))[layer.value()];
    std::vector<float> expected;
    for (int64_t i = 0; i < kNew; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        const KvHead head(static_cast<int32_t>(h / 2));
        SelectedRows selection;
        if (budget == kAllRows) {
          selection.rows.resize(static_cast<size_t>(zone.rows()));
          std::iota(selection.rows.begin(), selection.rows.end(), zone.begin);
        } else {
          KeyPlacement placement{&table, config_.local + i + 1, layer.value() < 3};
          SelectRequest request{.layer = layer, .head = head, .queries = 2, .budget = budget};
          request.q = &q[static_cast<size_t>((i * 4 + h / 2 * 2) * 16)];
          request.placement = &placement;
          selector->Select(request, selection);
        }
        std::vector<std::vector<float>> keys, values;
        const HeadView& of_head = rows->At(layer, head);
        std::vector<Position> positions;
        for (Position row = 0; row < zone.begin; ++row) positions.push_back(row);
        for (const Position row : selection.rows) positions.push_back(row);
        for (Position row = zone.end; row < tokens; ++row) positions.push_back(row);
        for (const Position row : positions) {
          keys.push_back(rows->Row(of_head.Key(row)));
          values.push_back(rows->Row(of_head.Value(row)));
        }
        for (int64_t j = 0; j <= i; ++j) {
          const auto at = (j * 2 + h / 2) * 16;
          keys.emplace_back(k.begin() + at, k.begin() + at + 16);
          values.emplace_back(v.begin() + at, v.begin() + at + 16);
        }
        for (const float x : Plain(q.data() + (i * 4 + h) * 16, keys, values)) {
          expected.push_back(x);
        }
      }
    }
    EXPECT_LE(RelativeError(attended, expected), 1e-4) << GetParam() << " tokens " << tokens;
  }

  // Row r at position r, the farthest within the trained length.
  std::vector<float> Plain(const float* q, std::vector<std::vector<float>>& keys,
                           const std::vector<std::vector<float>>& values) {
    const auto total = static_cast<int64_t>(keys.size());
    const int64_t shared = std::max<int64_t>(0, total - model_.max_position_embeddings);
    std::vector<float> turned(q, q + 16);
    kernels::RefRope(turned.data(), 1, 1, 16, total - 1 - shared, inv_freq_.data());
    std::vector<double> out(16);
    double sum = 0;
    for (int64_t r = 0; r < total; ++r) {
      std::vector<float>& key = keys[static_cast<size_t>(r)];
      kernels::RefRope(key.data(), 1, 1, 16, std::max<int64_t>(0, r - shared), inv_freq_.data());
      double dot = 0;
      for (size_t c = 0; c < 16; ++c) dot += double{turned[c]} * key[c];
      const double weight = std::exp(dot / 4);
      sum += weight;
      for (size_t c = 0; c < 16; ++c) out[c] += weight * values[static_cast<size_t>(r)][c];
    }
    std::vector<float> result;
    for (const double x : out) result.push_back(static_cast<float>(x / sum));
    return result;
  }

  std::mt19937_64 rng_{TestSeed()};
  model::ModelConfig model_;
  RetrievalConfig config_;
  std::vector<float> inv_freq_;
};
INSTANTIATE_TEST_SUITE_P(
    Methods, RepositionedAttentionTest,
    testing::Values("exact", "hip:block_k=3", "infinitehip:survivors=scaled"),
    [](const auto& info) {
      return std::string(info.param).substr(0, std::string(info.param).find(':'));
    });

TEST_P(RepositionedAttentionTest, EveryRowWithinTheTrainedLength_IsDenseAttention) {
  config_.selection = select::All();
  for (const int64_t tokens : {11, 300, 1500}) Check(tokens, Layer(0), /*reading_prompt=*/false);
  Check(700, Layer(4), /*reading_prompt=*/true);
}

TEST_P(RepositionedAttentionTest, ChosenRows_StandAtConsecutivePositions) {
  SelectorConfig& method = std::get<HostZoneOptions>(config_.zone).selector;
  auto infinite_hip = OptionsOf<InfiniteHipConfig>(method);
  for (InfiniteHipStage& stage : infinite_hip.stages) stage.refresh = 1;
  if (method.kind == SelectorKind::kInfiniteHip) method.options = infinite_hip;
  for (int round = 0; round < 6; ++round) {
    config_.selection = select::TopK{8 + Below(60)};
    const Layer layer(static_cast<int32_t>(Below(5)));
    Check(100 + Below(900), layer, round % 2 == 0);
  }
}

TEST_P(RepositionedAttentionTest, MoreRowsThanTheTrainedLength_TheEarliestShareAPosition) {
  model_.max_position_embeddings = 64;
  config_.selection = select::All();
  Check(200, Layer(1), /*reading_prompt=*/false);
}

// One query, so that the group score keeps the order of the scores.
TEST(KeyPlacementTest, Exact_ChoosesTheKeysThatScoreBestWhereTheyStand) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(0);
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16};
  const PlainRows rows(rng, shape, 400);
  const kernels::RopeTable table(model::RopeInvFreq({.theta = 10000}, 16), 4096);
  const RowRange zone{5, 390};
  const auto selector = *MakeRowSelector(*ParseSelector("exact"), shape, zone, rows, &pool);
  for (const bool chunk_indexed : {true, false}) {
    const std::vector<float> q = RandomNormal(rng, 16);
    const KeyPlacement placement{&table, 17, chunk_indexed};
    std::vector<std::pair<double, Position>> scores;
    for (Position row = zone.begin; row < zone.end; ++row) {
      std::vector<float> key = rows.Row(rows.At(Layer(0), KvHead(0)).Key(row));
      const int64_t distance = 17 + (chunk_indexed ? zone.end - 1 - row : 0);
      std::vector<float> turned = q;
      kernels::RefRope(turned.data(), 1, 1, 16, 1000,
                       model::RopeInvFreq({.theta = 10000}, 16).data());
      kernels::RefRope(key.data(), 1, 1, 16, 1000 - distance,
                       model::RopeInvFreq({.theta = 10000}, 16).data());
      double dot = 0;
      for (size_t c = 0; c < 16; ++c) dot += double{turned[c]} * key[c];
      scores.emplace_back(-dot, row);
    }
    std::sort(scores.begin(), scores.end());
    std::vector<Position> expected;
    for (size_t i = 0; i < 20; ++i) expected.push_back(scores[i].second);
    std::sort(expected.begin(), expected.end());
    SelectedRows selection;
    SelectRequest request{.layer = Layer(0), .head = KvHead(0), .queries = 1, .budget = 20};
    request.q = q.data();
    request.placement = &placement;
    selector->Select(request, selection);
    EXPECT_EQ(selection.rows, expected) << "chunk_indexed " << chunk_indexed;
  }
}

}  // namespace
}  // namespace carrel::decoder
