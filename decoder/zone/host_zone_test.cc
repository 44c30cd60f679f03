#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "common/test_util.h"
#include "decoder/select/random_rows.h"
#include "decoder/select/selector_config.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 6, .kv_heads = 2, .head_dim = 16};

class HostZoneTest : public testing::Test {
 protected:
  // What n tokens see of a layer that attends to `selection`.
  Partial Attend(const std::shared_ptr<const HostRows>& rows, RowRange zone,
                 const select::Selection& selection, const std::vector<float>& q, int threads,
                 bool whole_prompt = false) {
    ThreadPool pool(threads - 1);
    OpenedContext context;
    context.config.estimate = Estimate::kOff;
    if (whole_prompt) context.config.prompt_rows = PromptRows::kAll;
    context.selections = {selection};
    context.shape = kShape;
    context.tokens = rows->tokens();
    context.zone = zone;
    context.pool = &pool;
    context.rows = rows;
    auto host = MakeHostZone({*ParseSelector("exact")}, context);
    EXPECT_TRUE(host.ok()) << host.status();
    Partial partial;
    const int64_t n = static_cast<int64_t>(q.size()) / (kShape.q_heads * kShape.head_dim);
    (*host)->set_reading_prompt(whole_prompt);
    EXPECT_TRUE((*host)->Start(Layer(0), q.data(), n).ok());
    EXPECT_TRUE((*host)->Finish(Layer(0), q.data(), n, partial).ok());
    const LayerStatistics& statistics = (*host)->statistics()[0];
    EXPECT_EQ(statistics.whole_tokens, whole_prompt ? n : 0);
    EXPECT_EQ(statistics.whole_rows, whole_prompt ? n * kShape.kv_heads * zone.rows() : 0);
    return partial;
  }

  static void ExpectDense(const RandomRows& rows, RowRange zone, const std::vector<float>& q,
                          const Partial& partial) {
    const int64_t d = kShape.head_dim;
    for (size_t at = 0; at < partial.lse.size(); ++at) {
      const KvHead head(
          static_cast<int32_t>(static_cast<int64_t>(at) % kShape.q_heads / kShape.group()));
      std::vector<double> sum(static_cast<size_t>(d));
      double total = 0;
      for (Position j = zone.begin; j < zone.end; ++j) {
        double score = 0;
        for (int64_t c = 0; c < d; ++c) {
          score += double{q[at * static_cast<size_t>(d) + static_cast<size_t>(c)]} *
                   rows.Key(Layer(0), head, j, c);
        }
        const double weight = std::exp(score / std::sqrt(static_cast<double>(d)));
        total += weight;
        for (int64_t c = 0; c < d; ++c) {
          sum[static_cast<size_t>(c)] += weight * rows.Value(Layer(0), head, j, c);
        }
      }
      EXPECT_NEAR(partial.lse[at], std::log(total), 1e-4);
      for (int64_t c = 0; c < d; ++c) {
        EXPECT_NEAR(partial.out[at * static_cast<size_t>(d) + static_cast<size_t>(c)],
                    sum[static_cast<size_t>(c)] / total, 1e-4);
      }
    }
  }

  std::mt19937_64 rng_{TestSeed()};
};

TEST_F(HostZoneTest, EveryRow_AnyThreadsAndTokens_SameBitsAsDenseAttention) {
  for (const int64_t tokens :
       {int64_t{300}, int64_t{2600}, 1100 + static_cast<int64_t>(rng_() % 900)}) {
    const auto rows = std::make_shared<RandomRows>(rng_, kShape, tokens, tokens / 3 + 1);
    const RowRange zone{4, tokens - static_cast<int64_t>(rng_() % 64)};
    for (const int64_t n : {1, 3, 40}) {
      const std::vector<float> q = RandomNormal(rng_, n * kShape.q_heads * kShape.head_dim);
      const Partial alone = Attend(rows, zone, select::All(), q, 1);
      if (n < 40) ExpectDense(*rows, zone, q, alone);
      for (const int threads : {2, 3, 16}) {
        const Partial shared = Attend(rows, zone, select::All(), q, threads);
        EXPECT_EQ(alone.out, shared.out) << threads << " threads, " << n << " tokens";
        EXPECT_EQ(alone.lse, shared.lse);
      }
      // A token has the bits that it has alone.
      const auto width = kShape.q_heads * kShape.head_dim;
      const Partial first = Attend(rows, zone, select::All(), {q.begin(), q.begin() + width}, 16);
      EXPECT_TRUE(std::equal(first.out.begin(), first.out.end(), alone.out.begin()));
    }
  }
}

// Pieces of the scan, of the pass over its scores and of the rows scored exactly.
TEST_F(HostZoneTest, SelectedRows_AnyThreads_SameBits) {
  const int64_t tokens = 9000;
  const auto rows = std::make_shared<RandomRows>(rng_, kShape, tokens, tokens);
  const RowRange zone{4, tokens - 64};
  for (const int64_t budget : {7, 300, 1500}) {
    const std::vector<float> q = RandomNormal(rng_, 2 * kShape.q_heads * kShape.head_dim);
    const Partial alone = Attend(rows, zone, select::TopK{budget}, q, 1);
    for (const int threads : {2, 3, 16}) {
      const Partial shared = Attend(rows, zone, select::TopK{budget}, q, threads);
      EXPECT_EQ(alone.out, shared.out) << threads << " threads, " << budget << " rows";
      EXPECT_EQ(alone.lse, shared.lse);
    }
  }
}

TEST_F(HostZoneTest, APromptThatTakesAll_IsDenseAttention) {
  const int64_t tokens = 1500;
  const auto rows = std::make_shared<RandomRows>(rng_, kShape, tokens, tokens);
  const RowRange zone{4, tokens - 64};
  const std::vector<float> q = RandomNormal(rng_, 5 * kShape.q_heads * kShape.head_dim);
  const Partial dense = Attend(rows, zone, select::All(), q, 2);
  const Partial chosen = Attend(rows, zone, select::TopK{9}, q, 2);
  const Partial prompt = Attend(rows, zone, select::TopK{9}, q, 2, /*whole_prompt=*/true);
  EXPECT_EQ(prompt.out, dense.out);
  EXPECT_EQ(prompt.lse, dense.lse);
  EXPECT_NE(chosen.out, dense.out);
}

}  // namespace
}  // namespace carrel::decoder
