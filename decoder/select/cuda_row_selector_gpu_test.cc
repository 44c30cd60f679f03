// Every method on the GPU against its CPU selector, on the same random rows.
#include <algorithm>

#include "common/cuda/buffer.h"
#include "common/cuda/graph.h"
#include "common/test_random.h"
#include "decoder/config.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/random_rows.h"
#include "kernels/select/rescore_rows/rescore_rows.h"

namespace carrel::decoder {
namespace {

// Multiples of 1/8 up to 4: products of two sum up without rounding, so that both sides score alike
// and ties are ties.
float OnGrid(float x) { return std::clamp(std::round(8 * x), -32.0f, 32.0f) / 8; }

// Of the CPU's rows in a sequence the GPU leaves out at most `differs`, and `of_random` of what it
// would leave out if candidates were any rows: more than the worst of 480 sequences did.
struct Case {
  const char* method;
  double differs;
  double of_random = 0;
};

// Of `rows` rows: which are left out is independent, so that counts scatter as Poisson's do.
double MostLeftOut(double share, int64_t rows) {
  const double usual = share * static_cast<double>(rows);
  return usual + 6 * std::sqrt(usual) + 4;
}

class CudaRowSelectorGpuTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto stream = cuda::Stream::Create();
    CARREL_ASSERT_OK(stream);
    stream_ = *std::move(stream);
  }
  int64_t Below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(rng_);
  }

  // Rows of the GPU's choice, per KV head.
  std::vector<std::vector<Position>> Selected(const CudaRowSelector& selector, Layer layer,
                                              int32_t kv_heads) {
    const CudaSelection selection = selector.selection(layer);
    std::vector<int32_t> ids(static_cast<size_t>(kv_heads * selection.stride));
    std::vector<int32_t> counts(static_cast<size_t>(kv_heads),
                                static_cast<int32_t>(selection.rows));
    EXPECT_EQ(cudaSuccess,
              cudaMemcpy(ids.data(), selection.ids, ids.size() * 4, cudaMemcpyDefault));
    if (selection.row_count != nullptr) {
      EXPECT_EQ(cudaSuccess, cudaMemcpy(counts.data(), selection.row_count, counts.size() * 4,
                                        cudaMemcpyDefault));
    }
    std::vector<std::vector<Position>> rows;
    for (int32_t head = 0; head < kv_heads; ++head) {
      const auto first = ids.begin() + head * selection.stride;
      rows.emplace_back(first, first + counts[static_cast<size_t>(head)]);
      std::sort(rows.back().begin(), rows.back().end());
      EXPECT_LE(static_cast<int64_t>(rows.back().size()), selection.rows);
    }
    return rows;
  }

  void RunSequence(const AttentionShape& heads, int64_t tokens, RowRange zone, int64_t budget);
  void RunRandomSequence(int64_t head_dim, int64_t most_group, int64_t most_tokens);

  std::mt19937_64 rng_{TestSeed()};
  ThreadPool pool_{1};
  cuda::Stream stream_;
};

INSTANTIATE_TEST_SUITE_P(
    Methods, CudaRowSelectorGpuTest,
    testing::Values(
        // Exact on the grid.
        Case{"hip", 0}, Case{"hip:block_k=1", 0}, Case{"hip:block_k=7,refresh=3", 0},
        Case{"infinitehip", 0}, Case{"infinitehip:preset=flash,survivors=scaled", 0},
        Case{"infinitehip:stages=100:600:6/7:300:4/3:1x:2", 0},
        Case{"infinitehip:stages=64:4x:8/64:4x:4/5:1x:1", 0},
        Case{"hash:codes=stored,query=signs,oversample=1", 0},
        // fp32 against fp32 in another order: rows at the boundary may change places.
        Case{"exact", 0.01}, Case{"channels", 0.02}, Case{"channels:oversample=1", 0.01},
        Case{"channels:by=qk,share=16,oversample=2", 0.02},
        // Scores are compared in steps of 2^-6.
        Case{"hash:codes=stored,query=signs", 0.02},
        // Bits of keys whose products nearly vanish may differ.
        Case{"hash:codes=random,query=signs", 0.02}, Case{"hash:bits=256,seed=7,query=signs", 0.02},
        Case{"hash:bits=64,oversample=1,query=signs", 0.02},
        // The CPU rounds what four bits weigh together, the GPU what each does, and it compares in
        // steps of 1/16: candidates differ. Stored codes here know nothing of their keys: the best
        // keys are anywhere among the candidates.
        Case{"hash:codes=stored", 0.02, 0.2}, Case{"hash:oversample=7", 0.02, 0.2},
        Case{"hash:codes=random", 0.02, 0.1}, Case{"hash:bits=256,seed=7", 0.02, 0.1},
        Case{"hash:codes=stored,oversample=1", 0.02, 0.2},
        Case{"hash:bits=64,oversample=1", 0.02, 0.2}),
    [](const auto& info) {
      std::string name = info.param.method;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

void CudaRowSelectorGpuTest::RunSequence(const AttentionShape& heads, int64_t tokens, RowRange zone,
                                         int64_t budget) {
  SCOPED_TRACE(absl::StrCat("head_dim ", heads.head_dim, " group ", heads.group(), " tokens ",
                            tokens, " zone ", zone.begin, "..", zone.end, " budget ", budget));
  RandomRows rows(rng_, heads, tokens, 1 + Below(tokens));
  std::vector<cuda::DeviceBuffer<uint16_t>> device_keys;
  CudaKeys keys;
  const int64_t row_stride = zone.rows() + Below(5);
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    auto buffer =
        cuda::DeviceBuffer<uint16_t>::Create(heads.kv_heads * row_stride * heads.head_dim);
    CARREL_ASSERT_OK(buffer);
    std::vector<uint16_t> host(static_cast<size_t>(buffer->size()), 0x7fc0);  // NaN: not to be read
    for (KvHead head(0); head.value() < heads.kv_heads; head = head.next()) {
      for (Position row = 0; row < tokens; ++row) {
        std::vector<float> key;
        for (int64_t c = 0; c < heads.head_dim; ++c) {
          key.push_back(OnGrid(rows.Key(layer, head, row, c)));
        }
        rows.SetKey(layer, head, row, key);
        if (row < zone.begin || row >= zone.end) continue;
        FloatToBf16(key, &host[static_cast<size_t>((head.value() * row_stride + row - zone.begin) *
                                                   heads.head_dim)]);
      }
    }
    ASSERT_EQ(cudaSuccess,
              cudaMemcpy(buffer->data(), host.data(), host.size() * 2, cudaMemcpyDefault));
    keys.layers.push_back({.k = buffer->data(), .row_stride = row_stride});
    device_keys.push_back(*std::move(buffer));
  }
  const SelectorConfig config = *ParseSelector(GetParam().method);
  const auto cpu = MakeRowSelector(config, heads, zone, rows, &pool_);
  CARREL_ASSERT_OK(cpu);
  CudaZoneShape shape{heads, zone, {}};
  // The first layer is dense.
  for (int32_t layer = 0; layer < heads.layers; ++layer) {
    shape.budgets.push_back(layer == 0 ? kAllRows : budget);
  }
  const auto gpu = MakeCudaRowSelector(config, shape, keys, &rows, &pool_, stream_);
  CARREL_ASSERT_OK(gpu);

  auto q = cuda::DeviceBuffer<uint16_t>::Create(heads.q_heads * heads.head_dim);
  CARREL_ASSERT_OK(q);
  const Layer layer(heads.layers - 1);
  std::vector<cuda::Graph> graphs;
  for (int64_t phase = 0; phase < (*gpu)->phases(); ++phase) {
    auto graph = cuda::Graph::Capture(stream_, [&] {
      return (*gpu)->Select({layer, q->data(), phase}, stream_);
    });
    CARREL_ASSERT_OK(graph);
    graphs.push_back(*std::move(graph));
  }
  const double random_leaves =
      1 - static_cast<double>(CandidateCount(budget, config.oversample, zone)) /
              static_cast<double>(zone.rows());
  const double share = GetParam().differs + GetParam().of_random * random_leaves;
  int64_t chosen = 0, left_out = 0;
  for (int64_t step = kPromptStep; step < 20; ++step) {
    std::vector<float> queries = RandomNormal(rng_, q->size());
    for (float& x : queries) x = OnGrid(x);
    std::vector<uint16_t> bf16(queries.size());
    FloatToBf16(queries, bf16.data());
    ASSERT_EQ(cudaSuccess, cudaMemcpy(q->data(), bf16.data(), bf16.size() * 2, cudaMemcpyDefault));
    ASSERT_EQ(cudaSuccess, cudaDeviceSynchronize());  // the stream does not wait for the copy
    const int64_t phase = (*gpu)->PhaseOf(step);
    ASSERT_LT(phase, (*gpu)->phases());
    if (phase + 1 < (*gpu)->phases() || (*gpu)->phases() == 1) {
      CARREL_ASSERT_OK(graphs[static_cast<size_t>(phase)].Launch(stream_));
    }
    CARREL_ASSERT_OK(stream_.Synchronize());
    const auto found = Selected(**gpu, layer, heads.kv_heads);
    for (KvHead head(0); head.value() < heads.kv_heads; head = head.next()) {
      SelectRequest request{.layer = layer, .head = head};
      request.q = queries.data() + head.value() * heads.group() * heads.head_dim;
      request.queries = heads.group();
      request.budget = budget;
      request.step = step;
      SelectedRows selection;
      (*cpu)->Select(request, selection);
      std::vector<Position> expected;
      for (const Position row : selection.rows) expected.push_back(row - zone.begin);
      const std::vector<Position>& rows_found = found[static_cast<size_t>(head.value())];
      ASSERT_EQ(rows_found.size(), expected.size()) << "step " << step << " head " << head;
      if (GetParam().differs == 0) {
        ASSERT_EQ(rows_found, expected) << "step " << step << " head " << head;
        continue;
      }
      std::vector<Position> missed;
      std::set_difference(expected.begin(), expected.end(), rows_found.begin(), rows_found.end(),
                          std::back_inserter(missed));
      // A step's queries may be unlike others; and of few rows all may differ.
      ASSERT_LE(static_cast<double>(missed.size()), MostLeftOut(2 * share, std::ssize(expected)))
          << "of " << expected.size() << ", step " << step << " head " << head;
      chosen += std::ssize(expected);
      left_out += std::ssize(missed);
    }
  }
  ASSERT_LE(static_cast<double>(left_out), MostLeftOut(share, chosen)) << "of " << chosen;
}

void CudaRowSelectorGpuTest::RunRandomSequence(int64_t head_dim, int64_t most_group,
                                               int64_t most_tokens) {
  const int32_t kv_heads = 1 + static_cast<int32_t>(Below(3));
  const int32_t group = 1 + static_cast<int32_t>(Below(most_group));
  const AttentionShape heads{.layers = 2,
                             .q_heads = kv_heads * group,
                             .kv_heads = kv_heads,
                             .head_dim = static_cast<int32_t>(head_dim)};
  const int64_t tokens = 30 + Below(most_tokens - 30);
  const Position begin = Below(5);
  const RowRange zone{begin, tokens - Below(9)};
  RunSequence(heads, tokens, zone, 1 + Below(std::min<int64_t>(zone.rows() - 1, 1000)));
}

// Random K and V of one layer on both sides, and queries.
struct DeviceRows {
  DeviceRows(std::mt19937_64& rng, const AttentionShape& heads, int64_t rows)
      : k(Random(rng, heads.kv_heads * rows * heads.head_dim)),
        v(Random(rng, heads.kv_heads * rows * heads.head_dim)),
        q(Random(rng, heads.q_heads * heads.head_dim)),
        device_k(*ToDevice(k)),
        device_v(*ToDevice(v)),
        device_q(*ToDevice(q)) {}
  static std::vector<uint16_t> Random(std::mt19937_64& rng, int64_t count) {
    std::vector<uint16_t> out(static_cast<size_t>(count));
    FloatToBf16(RandomNormal(rng, count), out.data());
    return out;
  }
  std::vector<uint16_t> k, v, q;
  cuda::DeviceBuffer<uint16_t> device_k, device_v, device_q;
};

// Attention of q head h to `chosen` rows of its KV head, in fp64; returns its lse.
double Attended(const DeviceRows& rows, const AttentionShape& heads, int64_t zone_rows, int32_t h,
                const std::vector<Position>& chosen, std::vector<float>& out) {
  const int64_t d = heads.head_dim, head = h / heads.group();
  const auto at = [&](const std::vector<uint16_t>& x, int64_t row, int64_t c) {
    return static_cast<double>(Bf16ToFloat(x[static_cast<size_t>(row * d + c)]));
  };
  std::vector<double> sums(static_cast<size_t>(d));
  double total = 0;
  for (const Position row : chosen) {
    double score = 0;
    for (int64_t c = 0; c < d; ++c)
      score += at(rows.q, h, c) * at(rows.k, head * zone_rows + row, c);
    const double weight = std::exp(score / std::sqrt(static_cast<double>(d)));
    total += weight;
    for (int64_t c = 0; c < d; ++c) {
      sums[static_cast<size_t>(c)] += weight * at(rows.v, head * zone_rows + row, c);
    }
  }
  for (const double sum : sums) out.push_back(static_cast<float>(sum / total));
  return std::log(total);
}

// Heads that take less than their layer's budget take the best of what they would have taken; and
// what attends while it selects attends to just these rows.
TEST_P(CudaRowSelectorGpuTest, HeadsOwnBudgets_AndAttentionInTheSameLaunch) {
  const AttentionShape heads{.layers = 1, .q_heads = 12, .kv_heads = 3, .head_dim = 64};
  const int64_t zone_rows = 1000 + Below(4000);
  const RandomRows stored(rng_, heads, zone_rows + 8, zone_rows + 8);
  const DeviceRows rows(rng_, heads, zone_rows);
  CudaZoneShape shape{heads, {0, zone_rows}, {1 + Below(300)}};
  const CudaKeys keys{{{rows.device_k.data(), rows.device_v.data(), zone_rows}}, nullptr};
  const SelectorConfig config = *ParseSelector(GetParam().method);
  const auto of_layer = MakeCudaRowSelector(config, shape, keys, &stored, &pool_, stream_);
  CARREL_ASSERT_OK(of_layer);
  for (int i = 0; i < heads.kv_heads; ++i)
    shape.head_budgets.push_back(1 + Below(shape.budgets[0]));
  const auto of_heads = MakeCudaRowSelector(config, shape, keys, &stored, &pool_, stream_);
  CARREL_ASSERT_OK(of_heads);
  const Layer layer(0);
  CARREL_ASSERT_OK((*of_layer)->Select({layer, rows.device_q.data()}, stream_));
  CARREL_ASSERT_OK((*of_heads)->Select({layer, rows.device_q.data()}, stream_));
  CARREL_ASSERT_OK(stream_.Synchronize());
  const auto all = Selected(**of_layer, layer, heads.kv_heads);
  const auto own = Selected(**of_heads, layer, heads.kv_heads);
  EXPECT_EQ(*CudaRowSelectorBytes(config, shape, &stored), (*of_heads)->bytes());
  if ((*of_heads)->selection(layer).total_rows < 0) {
    EXPECT_EQ(own, all);
    EXPECT_FALSE((*of_heads)->attends(layer) && !(*of_layer)->attends(layer));
    return;
  }
  int64_t total = 0;
  for (size_t head = 0; head < own.size(); ++head) {
    EXPECT_EQ(static_cast<int64_t>(own[head].size()), shape.head_budgets[head]);
    EXPECT_TRUE(
        std::includes(all[head].begin(), all[head].end(), own[head].begin(), own[head].end()));
    total += shape.head_budgets[head];
  }
  EXPECT_EQ((*of_heads)->selection(layer).total_rows, total);
  if (!(*of_heads)->attends(layer)) return;
  auto out = cuda::DeviceBuffer<float>::Create(heads.q_heads * heads.head_dim);
  auto lse = cuda::DeviceBuffer<float>::Create(heads.q_heads);
  CARREL_ASSERT_OK(out);
  CARREL_ASSERT_OK(lse);
  CARREL_ASSERT_OK(
      (*of_heads)->Select({layer, rows.device_q.data(), 0, {out->data(), lse->data()}}, stream_));
  CARREL_ASSERT_OK(stream_.Synchronize());
  EXPECT_EQ(Selected(**of_heads, layer, heads.kv_heads), own);
  std::vector<float> found(static_cast<size_t>(out->size())), found_lse(12), expected, expected_lse;
  ASSERT_EQ(cudaSuccess,
            cudaMemcpy(found.data(), out->data(), found.size() * 4, cudaMemcpyDefault));
  ASSERT_EQ(cudaSuccess, cudaMemcpy(found_lse.data(), lse->data(), 48, cudaMemcpyDefault));
  for (int32_t h = 0; h < heads.q_heads; ++h) {
    expected_lse.push_back(static_cast<float>(
        Attended(rows, heads, zone_rows, h, own[static_cast<size_t>(h / 4)], expected)));
  }
  EXPECT_LT(RelativeError(found.data(), expected.data(), out->size()), 5e-3);
  EXPECT_LT(RelativeError(found_lse.data(), expected_lse.data(), 12), 1e-3);
}

// Over what the first one keeps of the keys, with a state of its own.
TEST_P(CudaRowSelectorGpuTest, Another_ChoosesWhatTheFirstDoes_AndLeavesItsChoice) {
  const SelectorConfig config = *ParseSelector(GetParam().method);
  const AttentionShape heads{.layers = 1, .q_heads = 6, .kv_heads = 3, .head_dim = 64};
  const int64_t zone_rows = 1000 + Below(4000);
  const RandomRows stored(rng_, heads, zone_rows + 8, zone_rows + 8);
  const DeviceRows rows(rng_, heads, zone_rows), other(rng_, heads, 1);
  CudaZoneShape shape{heads, {0, zone_rows}, {1 + Below(300)}};
  for (int i = 0; i < heads.kv_heads; ++i)
    shape.head_budgets.push_back(1 + Below(shape.budgets[0]));
  const CudaKeys keys{{{rows.device_k.data(), rows.device_v.data(), zone_rows}}, nullptr};
  const auto first = MakeCudaRowSelector(config, shape, keys, &stored, &pool_, stream_);
  CARREL_ASSERT_OK(first);
  const auto another = (*first)->Another();
  CARREL_ASSERT_OK(another);
  ASSERT_EQ(*another != nullptr, MethodOf(config).forks());
  if (*another == nullptr) return;
  EXPECT_EQ((*another)->bytes(), *CudaAnotherBytes(config, shape, &stored));
  const Layer layer(0);
  const auto choose = [&](const CudaRowSelector& selector, const DeviceRows& queries) {
    CARREL_EXPECT_OK(selector.Select({layer, queries.device_q.data()}, stream_));
    CARREL_EXPECT_OK(stream_.Synchronize());
    return Selected(selector, layer, heads.kv_heads);
  };
  const auto chosen = choose(**first, rows);
  EXPECT_EQ(choose(**another, rows), chosen);
  EXPECT_NE(choose(**another, other), chosen);
  EXPECT_EQ(Selected(**first, layer, heads.kv_heads), chosen);
}

// A sanitizer takes minutes for each of the long ones.
TEST_P(CudaRowSelectorGpuTest, LongSequenceOf64_SelectsAsTheCpuDoes) {
  RunRandomSequence(64, 16, 6030);
}

TEST_P(CudaRowSelectorGpuTest, LongSequenceOf128_SelectsAsTheCpuDoes) {
  RunRandomSequence(128, 4, 6030);
}

TEST_P(CudaRowSelectorGpuTest, ShortSequences_SelectAsTheCpuDoes) {
  for (int round = 0; round < 2; ++round) {
    RunRandomSequence(64, 16, 730);
    if (HasFatalFailure()) return;
    RunRandomSequence(128, 4, 730);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaRowSelectorGpuTest, PlannedBytes_AreThoseTaken) {
  const AttentionShape heads{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  const int64_t tokens = 4000 + Below(5000);
  const RandomRows rows(rng_, heads, tokens, tokens);
  const CudaZoneShape shape{heads, {4, tokens - 64}, {kAllRows, 1 + Below(300), 1 + Below(2000)}};
  auto buffer = cuda::DeviceBuffer<uint16_t>::Create(2 * tokens * 64);
  CARREL_ASSERT_OK(buffer);
  ASSERT_EQ(cudaSuccess, cudaMemset(buffer->data(), 0, static_cast<size_t>(buffer->bytes())));
  const CudaKeys keys{std::vector<kernels::KvView>(3, {buffer->data(), nullptr, tokens}), nullptr};
  const SelectorConfig config = *ParseSelector(GetParam().method);
  const auto planned = CudaRowSelectorBytes(config, shape, &rows);
  const auto selector = MakeCudaRowSelector(config, shape, keys, &rows, &pool_, stream_);
  CARREL_ASSERT_OK(planned);
  CARREL_ASSERT_OK(selector);
  EXPECT_EQ((*selector)->bytes(), *planned);
}

TEST(MakeCudaRowSelectorTest, WhatTheKernelsDoNotServe_IsRefused) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(0);
  const auto stream = cuda::Stream::Create();
  CARREL_ASSERT_OK(stream);
  const AttentionShape heads{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  RandomRows rows(rng, heads, 20'000, 20'000);
  rows.no_codes = rows.no_queries = true;
  const auto make = [&](const char* method, int64_t budget) {
    const CudaZoneShape shape{heads, {0, 20'000}, {budget}};
    return MakeCudaRowSelector(*ParseSelector(method), shape,
                               {{{nullptr, nullptr, 20'000}}, nullptr}, &rows, &pool, *stream)
        .status();
  };
  EXPECT_THAT(make("hip:ensemble=2", 64), StatusIs(absl::StatusCode::kInvalidArgument, "ensemble"));
  EXPECT_THAT(make("hip", 8194), StatusIs(absl::StatusCode::kInvalidArgument, "4097 branches"));
  EXPECT_THAT(make("channels", 64), StatusIs(absl::StatusCode::kNotFound, "none are stored"));
  EXPECT_THAT(make("hash:codes=stored", 64),
              StatusIs(absl::StatusCode::kNotFound, "no codes are stored"));
}

TEST(MakeCudaRowSelectorTest, MoreCandidatesThanAGpuRescores_AreRefusedOrFewer) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const auto stream = cuda::Stream::Create();
  CARREL_ASSERT_OK(stream);
  const AttentionShape heads{.layers = 1, .q_heads = 16, .kv_heads = 1, .head_dim = 64};
  const int64_t most = kernels::MostRescoredRows(16), tokens = most + 100;
  const RandomRows rows(rng, heads, tokens, tokens);
  auto buffer = cuda::DeviceBuffer<uint16_t>::Create(tokens * 64);
  CARREL_ASSERT_OK(buffer);
  ASSERT_EQ(cudaSuccess, cudaMemset(buffer->data(), 0, static_cast<size_t>(buffer->bytes())));
  const CudaZoneShape shape{heads, {0, tokens}, {most / 3}};
  const auto make = [&](const char* method) {
    return MakeCudaRowSelector(*ParseSelector(method), shape,
                               {{{buffer->data(), nullptr, tokens}}, nullptr}, &rows, &pool,
                               *stream)
        .status();
  };
  EXPECT_THAT(make("hash:bits=64,oversample=8"),
              StatusIs(absl::StatusCode::kInvalidArgument, "method=hash: oversample=8 makes"));
  EXPECT_THAT(make("channels:oversample=8"),
              StatusIs(absl::StatusCode::kInvalidArgument, "a GPU re-scores"));
  CARREL_EXPECT_OK(make("hash:bits=64"));
}

}  // namespace
}  // namespace carrel::decoder
