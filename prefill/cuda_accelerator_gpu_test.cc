#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <set>
#include <thread>

#include "common/cuda/buffer.h"
#include "common/dtype.h"
#include "common/test_util.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index.h"
#include "kvstore/index/summaries/summaries.h"
#include "prefill/cuda_accelerator.h"

namespace carrel::prefill {
namespace {

constexpr int64_t kTokens = 5000, kDim = 128;

class CudaAcceleratorGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    rng_.seed(TestSeed());
    auto made = MakeCudaAccelerator(kTokens, /*summaries=*/false);
    CARREL_ASSERT_OK(made);
    accelerator_ = *std::move(made);
    auto pinned = cuda::PinnedBuffer<uint16_t>::Create(kTokens * kDim);
    CARREL_ASSERT_OK(pinned);
    rows_ = *std::move(pinned);
    // As keys are: a large mean, and some directions that vary more.
    std::vector<float> values = RandomNormal(rng_, kTokens * kDim);
    for (int64_t i = 0; i < kTokens * kDim; ++i) {
      const int64_t c = i % kDim;
      values[i] = values[i] * (c < 16 ? 4.0f : 0.5f) + (c % 5 == 0 ? 3.0f : 0.0f);
    }
    FloatToBf16(values, rows_.data());
    queries_.group = 4;
    queries_.head_dim = kDim;
    for (int64_t i = 0; i < 64; ++i) queries_.positions.push_back(i * kTokens / 64);
    queries_.queries = RandomNormal(rng_, 64 * 4 * kDim);
  }

  kvstore::Rows Keys(int64_t rows) { return kvstore::Rows::FromMemory(rows_.data(), rows, kDim); }

  absl::StatusOr<std::string> Build(int64_t rows, int bits, bool trained, bool accelerated) {
    kvstore::IndexParams params;
    params.kind = kvstore::IndexKind::kCode;
    params.code_bits = bits;
    params.code_training = trained ? kvstore::CodeTraining::kStaged : kvstore::CodeTraining::kOff;
    return kvstore::BuildIndex(params, Keys(rows), &queries_,
                               accelerated ? accelerator_.get() : nullptr);
  }

  std::mt19937_64 rng_;
  std::unique_ptr<kvstore::Accelerator> accelerator_;
  cuda::PinnedBuffer<uint16_t> rows_;
  kvstore::SampledQueries queries_;
};

TEST_F(CudaAcceleratorGpuTest, CodeIndexes_AreTheCpus) {
  for (const int bits : {64, 128, 256}) {
    for (const bool trained : {false, true}) {
      for (const int64_t rows : {int64_t{0}, int64_t{64}, int64_t{777}, kTokens}) {
        SCOPED_TRACE(absl::StrCat(bits, " bits, trained ", trained, ", rows ", rows));
        const auto cpu = Build(rows, bits, trained, false), gpu = Build(rows, bits, trained, true);
        CARREL_ASSERT_OK(cpu);
        CARREL_ASSERT_OK(gpu);
        ASSERT_EQ(cpu->size(), gpu->size());
        int64_t differing = 0;
        for (size_t i = 0; i < cpu->size(); ++i) {
          differing += std::popcount(static_cast<uint8_t>((*cpu)[i] ^ (*gpu)[i]));
        }
        // Only where a product nearly vanishes, and with stages what follows from that.
        EXPECT_LE(differing, 64 + rows * bits / (trained ? 2000 : 20000));
      }
    }
  }
}

TEST_F(CudaAcceleratorGpuTest, ManyCallersAtOnce_SameBytes) {
  const auto once = Build(kTokens, 128, false, true);
  CARREL_ASSERT_OK(once);
  std::vector<absl::StatusOr<std::string>> built(12, std::string());
  std::vector<std::thread> threads;
  for (auto& of_thread : built) {
    threads.emplace_back([&] { of_thread = Build(kTokens, 128, false, true); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_thread : built) {
    CARREL_ASSERT_OK(of_thread);
    EXPECT_TRUE(*of_thread == *once);
  }
}

TEST_F(CudaAcceleratorGpuTest, NearestKeys_AreTheBest) {
  const std::vector<Position> limits = {0, 1, 1, 500, 500, 500, kTokens, kTokens};
  const std::vector<float> queries = RandomNormal(rng_, static_cast<int64_t>(limits.size()) * kDim);
  constexpr int64_t kNearest = 128;
  const auto found = accelerator_->FindNearest(queries, limits, Keys(kTokens), kNearest);
  if (absl::IsUnimplemented(found.status())) GTEST_SKIP() << found.status();
  CARREL_ASSERT_OK(found);
  std::vector<float> row(kDim);
  for (size_t i = 0; i < limits.size(); ++i) {
    std::vector<double> products;
    for (Position j = 0; j < limits[i]; ++j) {
      WidenToFloat(DType::kBf16, rows_.data() + j * kDim, kDim, row.data());
      double sum = 0;
      for (int64_t c = 0; c < kDim; ++c) sum += double{queries[i * kDim + c]} * row[c];
      products.push_back(sum);
    }
    std::vector<double> best = products;
    std::sort(best.begin(), best.end(), std::greater<double>());
    for (int64_t r = 0; r < kNearest; ++r) {
      const int64_t id = found->ids[i * kNearest + r];
      if (r >= limits[i]) {
        EXPECT_EQ(id, -1) << "query " << i << " rank " << r;
        continue;
      }
      ASSERT_GE(id, 0);
      ASSERT_LT(id, limits[i]);
      EXPECT_NEAR(products[id], best[r], 1e-3) << "query " << i << " rank " << r;
      EXPECT_NEAR(found->products[i * kNearest + r], products[id], 1e-3);
    }
  }
}

// Other roundings, other clusters: as good, not the same.
TEST_F(CudaAcceleratorGpuTest, GraphAndIvf_FindAsMuchAsTheCpus) {
  if (absl::IsUnimplemented(accelerator_->FindNearest({}, {}, Keys(1), 1).status())) {
    GTEST_SKIP() << "Faiss has no GPU half here";
  }
  for (const auto kind : {kvstore::IndexKind::kGraph, kvstore::IndexKind::kIvf}) {
    kvstore::IndexParams params;
    params.kind = kind;
    int64_t found[2] = {};
    for (const bool accelerated : {false, true}) {
      auto blob = kvstore::BuildIndex(params, Keys(kTokens), &queries_,
                                      accelerated ? accelerator_.get() : nullptr);
      CARREL_ASSERT_OK(blob);
      const auto index = kvstore::OpenIndex(params, *std::move(blob), Keys(kTokens));
      CARREL_ASSERT_OK(index);
      const auto flat = kvstore::OpenIndex({}, kvstore::Blob(), Keys(kTokens));
      CARREL_ASSERT_OK(flat);
      kvstore::SearchScratch scratch;
      for (int64_t i = 32; i < 64; ++i) {
        kvstore::SearchRequest request;
        request.queries = queries_.Query(i, 0);
        request.group = 4;
        request.scale = 0.1f;
        request.zone = {0, kTokens};
        request.top_k = 64;
        // Few lists: of as many as by default all rows would be read, whatever is in which list.
        request.effort = kind == kvstore::IndexKind::kIvf ? 16 : 0;
        kvstore::SearchResult got, best;
        CARREL_ASSERT_OK((*index)->Search(request, scratch, got));
        CARREL_ASSERT_OK((*flat)->Search(request, scratch, best));
        EXPECT_FALSE(got.zone_scored);
        std::sort(got.ids.begin(), got.ids.end());
        for (const Position id : best.ids) {
          found[accelerated] += std::binary_search(got.ids.begin(), got.ids.end(), id);
        }
      }
    }
    std::cout << kvstore::IndexKindName(kind) << ": of 2048 best rows the CPU's index finds "
              << found[0] << ", the GPU's " << found[1] << std::endl;
    EXPECT_GE(found[1], found[0] - 64);
  }
}

TEST_F(CudaAcceleratorGpuTest, ShapesNotServed_AreLeftToTheCpu) {
  const std::vector<uint16_t> rows(20 * 24);
  kvstore::IndexParams params;
  params.kind = kvstore::IndexKind::kCode;
  const auto keys = kvstore::Rows::FromMemory(rows.data(), 40, 12);
  const auto cpu = kvstore::BuildIndex(params, keys, nullptr);
  const auto gpu = kvstore::BuildIndex(params, keys, nullptr, accelerator_.get());
  CARREL_ASSERT_OK(cpu);
  CARREL_ASSERT_OK(gpu);
  EXPECT_TRUE(*cpu == *gpu);
}

// Rows in pinned memory, and summaries of them by either.
class CudaSummariesGpuTest : public testing::Test {
 protected:
  static constexpr int64_t kGroup = 4;

  // Keys about centres, whose mean is not zero; V rows about one are alike, in part. Centres for 30
  // rows each: more than there are clusters of 40, so that many clusters hold two, and it matters
  // little which. Of a few large ones it would matter much.
  void Make(int64_t count, int64_t d) {
    count_ = count;
    d_ = d;
    const int64_t centres = std::max<int64_t>(100, count / 30);
    const std::vector<float> key_centres = RandomNormal(rng_, centres * d);
    const std::vector<float> value_centres = RandomNormal(rng_, centres * d);
    for (auto* rows : {&keys_, &values_}) {
      auto made = cuda::PinnedBuffer<uint16_t>::Create(count * d);
      CARREL_ASSERT_OK(made);
      *rows = *std::move(made);
    }
    std::vector<float> key(static_cast<size_t>(d)), value(key.size());
    std::normal_distribution<float> normal(0, 0.5f);
    for (int64_t i = 0; i < count; ++i) {
      const auto of = static_cast<int64_t>(rng_() % static_cast<uint64_t>(centres));
      for (int64_t c = 0; c < d; ++c) {
        key[c] = key_centres[of * d + c] + normal(rng_) + (c % 5 == 0 ? 3.0f : 0.0f);
        value[c] = value_centres[of * d + c] + normal(rng_);
      }
      FloatToBf16(key, keys_.data() + i * d);
      FloatToBf16(value, values_.data() + i * d);
    }
    sampled_ = {.group = kGroup, .head_dim = d};
    for (Position i = 0; i < 64; ++i) {
      sampled_.positions.push_back(i);
      for (float x : RandomNormal(rng_, kGroup * d)) sampled_.queries.push_back(x);
    }
    auto accelerator = MakeCudaAccelerator(count, /*summaries=*/true);
    CARREL_ASSERT_OK(accelerator);
    accelerator_ = *std::move(accelerator);
  }

  kvstore::Rows Keys() const { return kvstore::Rows::FromMemory(keys_.data(), count_, d_); }
  kvstore::Rows Values() const { return kvstore::Rows::FromMemory(values_.data(), count_, d_); }
  absl::StatusOr<std::string> Build(int64_t cluster_rows, bool sampled, bool accelerated) {
    return kvstore::BuildSummaries(cluster_rows, Keys(), Values(), sampled ? &sampled_ : nullptr,
                                   accelerated ? accelerator_.get() : nullptr);
  }

  // Of attention to all rows but the best 64: what the estimate is off, the mean of some queries.
  double ErrorOf(const kvstore::Summaries& summaries, uint64_t seed) {
    std::mt19937_64 rng(seed);
    const float scale = 1 / std::sqrt(static_cast<float>(d_));
    const kvstore::Rows values = Values();
    constexpr int kTrials = 16;
    double error = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      const std::vector<float> q = RandomNormal(rng, kGroup * d_);
      std::vector<std::vector<double>> scores(kGroup);
      for (int64_t h = 0; h < kGroup; ++h) {
        for (Position j = 0; j < count_; ++j) {
          double sum = 0;
          for (int64_t c = 0; c < d_; ++c)
            sum += q[h * d_ + c] * Bf16ToFloat(keys_.data()[j * d_ + c]);
          scores[h].push_back(sum * scale);
        }
      }
      std::vector<std::pair<double, Position>> order;
      for (Position j = 0; j < count_; ++j) order.push_back({-scores[0][j], j});
      std::sort(order.begin(), order.end());
      std::vector<Position> selected;
      std::vector<float> given;
      for (size_t i = 0; i < std::min<size_t>(64, order.size() / 2); ++i) {
        selected.push_back(order[i].second);
      }
      for (int64_t h = 0; h < kGroup; ++h) {
        for (Position j : selected) given.push_back(static_cast<float>(scores[h][j]));
      }
      std::vector<float> truth, out(static_cast<size_t>(kGroup * d_)), lse(kGroup);
      const std::set<Position> gone(selected.begin(), selected.end());
      for (int64_t h = 0; h < kGroup; ++h) {
        std::vector<double> sum(static_cast<size_t>(d_));
        double total = 0;
        const double top = *std::max_element(scores[h].begin(), scores[h].end());
        for (Position j = 0; j < count_; ++j) {
          if (gone.count(j) > 0) continue;
          const double weight = std::exp(scores[h][j] - top);
          total += weight;
          for (int64_t c = 0; c < d_; ++c) {
            sum[c] += weight * Bf16ToFloat(values_.data()[j * d_ + c]);
          }
        }
        for (double s : sum) truth.push_back(static_cast<float>(s / total));
      }
      kvstore::EstimateScratch scratch;
      CARREL_EXPECT_OK(kvstore::EstimateRest(summaries, values,
                                             {.queries = q.data(),
                                              .group = kGroup,
                                              .scale = scale,
                                              .zone = {0, count_},
                                              .selected = selected,
                                              .scores = given.data(),
                                              .out = out.data(),
                                              .lse = lse.data()},
                                             scratch));
      error += RelativeError(out, truth) / kTrials;
    }
    return error;
  }

  std::mt19937_64 rng_{TestSeed()};
  int64_t count_ = 0, d_ = 0;
  cuda::PinnedBuffer<uint16_t> keys_, values_;
  kvstore::SampledQueries sampled_;
  std::unique_ptr<kvstore::Accelerator> accelerator_;
};

// Other roundings, other clusters: as good, not the same. Of 40,000 rows the GPU takes two batches.
TEST_F(CudaSummariesGpuTest, Summaries_EstimateAsTheCpus) {
  struct Case {
    int64_t count, d, cluster_rows;
    bool sampled;
  };
  for (const auto& [count, d, cluster_rows, sampled] : {Case{40000, 128, 40, true},
                                                        {9000, 64, 40, true},
                                                        {9000, 128, 40, false},
                                                        {5000, 128, 4, true},
                                                        {300, 64, 16, false},
                                                        {1, 128, 40, true}}) {
    SCOPED_TRACE(absl::StrCat(count, " rows of ", d, ", clusters of ", cluster_rows));
    ASSERT_NO_FATAL_FAILURE(Make(count, d));
    double errors[2] = {};
    std::string blobs[2];
    const uint64_t seed = rng_();
    for (const bool accelerated : {false, true}) {
      auto blob = Build(cluster_rows, sampled, accelerated);
      CARREL_ASSERT_OK(blob);
      blobs[accelerated] = *blob;
      const auto summaries = kvstore::Summaries::Open(*std::move(blob), count, d);
      CARREL_ASSERT_OK(summaries);
      for (int64_t s = 0; s < summaries->layout().segments(); ++s) {
        CARREL_EXPECT_OK(summaries->Segment(s));
      }
      errors[accelerated] = ErrorOf(*summaries, seed);
    }
    std::cout << count << " rows of " << d << ": relative error of estimates, CPU " << errors[0]
              << ", GPU " << errors[1] << std::endl;
    EXPECT_LT(errors[1], 1.05 * errors[0] + 0.02);
    EXPECT_TRUE(count == 1 || blobs[0] != blobs[1]) << "the GPU made none";
  }
}

TEST_F(CudaSummariesGpuTest, ManyCallersAtOnce_SameBytes) {
  ASSERT_NO_FATAL_FAILURE(Make(20000, 128));
  const auto once = Build(40, true, true);
  CARREL_ASSERT_OK(once);
  std::vector<absl::StatusOr<std::string>> built(12, std::string());
  std::vector<std::thread> threads;
  for (auto& of_thread : built) {
    threads.emplace_back([&] { of_thread = Build(40, true, true); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_thread : built) {
    CARREL_ASSERT_OK(of_thread);
    EXPECT_TRUE(*of_thread == *once);
  }
}

TEST_F(CudaSummariesGpuTest, NotServed_AreTheCpus) {
  ASSERT_NO_FATAL_FAILURE(Make(500, 32));  // of another width
  EXPECT_EQ(*Build(40, true, true), *Build(40, true, false));
  ASSERT_NO_FATAL_FAILURE(Make(500, 128));
  const auto without = MakeCudaAccelerator(500, /*summaries=*/false);
  const auto shorter = MakeCudaAccelerator(499, /*summaries=*/true);
  for (const auto* made : {&without, &shorter}) {
    CARREL_ASSERT_OK(*made);
    EXPECT_EQ(*kvstore::BuildSummaries(40, Keys(), Values(), &sampled_, (*made)->get()),
              *Build(40, true, false));
  }
}

}  // namespace
}  // namespace carrel::prefill
