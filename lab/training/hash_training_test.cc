#include "kvstore/index/code/hash_training.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "common/test_util.h"
#include "kvstore/index/index_test_checks.h"

namespace carrel::kvstore {
namespace {

Floats Normal(std::mt19937_64& rng, int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  Floats x(static_cast<size_t>(count));
  for (float& v : x) v = normal(rng);
  return x;
}

HashBatch MakeBatch(std::mt19937_64& rng, int64_t queries, int64_t keys, int64_t d) {
  HashBatch batch{.queries = queries, .keys = keys, .d = d};
  batch.q = Normal(rng, queries * d, 2);
  batch.k = Normal(rng, keys * d, 2);
  for (int64_t i = 0; i < queries * keys; ++i) {
    const float labels[] = {-1, 0, 1, 7.5f, 20};
    batch.labels.push_back(labels[rng() % 5]);
  }
  return batch;
}

// The formula of the header in plain loops of doubles, W plus `step` at `changed`.
double PlainLoss(const HashTrainingConfig& config, const HashBatch& batch, const Floats& w,
                 size_t changed, double step) {
  const int64_t bits = config.bits, d = batch.d;
  std::vector<double> moved(w.begin(), w.end());
  moved[changed] += step;
  const auto hash = [&](const Floats& x, int64_t row, int64_t bit) {
    double z = 0;
    for (int64_t c = 0; c < d; ++c) {
      z += moved[static_cast<size_t>(bit * d + c)] * x[static_cast<size_t>(row * d + c)];
    }
    return 2 / (1 + std::exp(-double{config.sigma} * z)) - 1;
  };
  double similarity = 0, balance = 0, orthogonality = 0, pairs = 0;
  for (int64_t j = 0; j < batch.queries; ++j) {
    for (int64_t i = 0; i < batch.keys; ++i) {
      const double label = batch.labels[static_cast<size_t>(j * batch.keys + i)];
      pairs += label != 0;
      for (int64_t b = 0; b < bits; ++b) {
        similarity += label * std::pow(hash(batch.q, j, b) - hash(batch.k, i, b), 2);
      }
    }
  }
  for (int64_t b = 0; b < bits; ++b) {
    double mean = 0;
    for (int64_t i = 0; i < batch.keys; ++i) mean += hash(batch.k, i, b);
    balance += std::pow(mean / static_cast<double>(batch.keys), 2);
    for (int64_t other = 0; other < bits; ++other) {
      double product = b == other ? -1 : 0;
      for (int64_t c = 0; c < d; ++c) {
        product +=
            moved[static_cast<size_t>(b * d + c)] * moved[static_cast<size_t>(other * d + c)];
      }
      orthogonality += product * product;
    }
  }
  return config.eps * similarity / pairs + config.eta * balance +
         config.lambda * std::sqrt(orthogonality);
}

TEST(HashTraining, LossAndGradient_EqualPlainLoopsAndFiniteDifferences) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 6; ++round) {
    const auto d = static_cast<int64_t>(3 + rng() % 12);
    HashTrainingConfig config;
    config.bits = static_cast<int64_t>(8 + rng() % 12);  // fewer and more than d
    // Every term counts in one of the rounds alone, and all together.
    config.eps = round == 1 || round == 2 ? 0.0f : 1.0f;
    config.eta = round == 0 || round == 2 ? 0.0f : 2.0f;
    config.lambda = round == 0 || round == 1 ? 0.0f : 1.0f;
    config.sigma = 0.3f;
    const auto queries = static_cast<int64_t>(1 + rng() % 9),
               keys = static_cast<int64_t>(1 + rng() % 40);
    const HashBatch batch = MakeBatch(rng, queries, keys, d);
    const Floats w = Normal(rng, config.bits * d, 0.5f);
    Floats gradient;
    const double loss = HashLoss(config, batch, w, gradient);
    const double plain = PlainLoss(config, batch, w, 0, 0);
    EXPECT_NEAR(loss, plain, 1e-4 * std::abs(plain) + 1e-5);
    ASSERT_EQ(gradient.size(), w.size());
    double error = 0, norm = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      constexpr double kStep = 1e-4;
      const double slope =
          (PlainLoss(config, batch, w, i, kStep) - PlainLoss(config, batch, w, i, -kStep)) /
          (2 * kStep);
      error += std::pow(gradient[i] - slope, 2);
      norm += slope * slope;
    }
    EXPECT_GT(norm, 0);
    EXPECT_LT(std::sqrt(error / norm), 1e-3) << "round " << round;
  }
}

TEST(HashTraining, Labels_BestTenthFallsFromTwentyToOneOthersAreMinusOneUnseenZero) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 20; ++round) {
    const auto keys = static_cast<int64_t>(1 + rng() % 300);
    const Floats scores = Normal(rng, keys, 1);
    std::vector<uint8_t> visible;
    for (int64_t i = 0; i < keys; ++i) visible.push_back(i == 0 || rng() % 4 != 0);
    Floats labels(static_cast<size_t>(keys), NAN);
    LabelKeys(scores.data(), visible.data(), keys, labels.data());
    std::vector<std::pair<float, float>> by_score;
    for (size_t i = 0; i < labels.size(); ++i) {
      if (!visible[i]) {
        EXPECT_EQ(labels[i], 0);
      } else {
        by_score.emplace_back(scores[i], labels[i]);
      }
    }
    std::sort(by_score.rbegin(), by_score.rend());
    const size_t best = (by_score.size() + 9) / 10;
    for (size_t r = 0; r < by_score.size(); ++r) {
      if (r >= best) {
        EXPECT_EQ(by_score[r].second, -1);
      } else if (best == 1) {
        EXPECT_EQ(by_score[r].second, 20);
      } else {
        EXPECT_NEAR(by_score[r].second, 20 - 19.0 * r / (best - 1), 1e-4);
      }
    }
  }
}

TEST(HashTraining, Train_SameInputSameWeights_LossFalls) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 3000, 32);
  const SampledQueries queries = MakeSampledQueries(rng, keys, 4, 40);
  const Rows rows = keys.AsRows();
  const Floats centre = MeanOf(SpreadKeys(rows, 3000), 3000, 32);
  HashTrainingConfig config{.bits = 64, .epochs = 4};
  config.eps = 1;  // so that what is learned is more than balance
  const Floats trained = TrainHash(config, rows, centre, queries);
  EXPECT_EQ(trained, TrainHash(config, rows, centre, queries));
  HashTrainingConfig none = config;
  none.epochs = 0;
  const Floats untrained = TrainHash(none, rows, centre, queries);
  // On a batch of its own: labels from the scores of queries and keys, all of them seen.
  HashBatch batch{.queries = 16, .keys = 500, .d = 32};
  for (int i = 0; i < 4; ++i) {
    const std::vector<float> q = MakeQueries(rng, keys, 4);
    batch.q.insert(batch.q.end(), q.begin(), q.end());
  }
  batch.k = SpreadKeys(rows, 500);
  SubtractFromRows(centre.data(), 500, 32, batch.k.data());
  Multiply multiply;
  const Floats scores = multiply(batch.q, 16, batch.k, 500);
  batch.labels.resize(scores.size());
  const std::vector<uint8_t> visible(500, 1);
  for (int64_t j = 0; j < 16; ++j) {
    LabelKeys(&scores[static_cast<size_t>(j * 500)], visible.data(), 500,
              &batch.labels[static_cast<size_t>(j * 500)]);
  }
  Floats ignored;
  const double before = HashLoss(config, batch, untrained, ignored);
  const double after = HashLoss(config, batch, trained, ignored);
  std::cout << "loss " << before << " before, " << after << " after training\n";
  EXPECT_LT(after, before);
}

}  // namespace
}  // namespace carrel::kvstore
