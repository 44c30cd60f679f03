// Everything is kept with the bits across the rows, [bits, keys], so that each product is one of
// Multiply's and only a batch is transposed, not what changes with W.
#include "kvstore/index/code/hash_training.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "common/dtype.h"

namespace carrel::kvstore {
namespace {

// Labels of the paper: of the best tenth, and of the rest.
constexpr int64_t kPositiveShare = 10;  // one in so many
constexpr float kBestLabel = 20, kLeastLabel = 1, kOtherLabel = -1;

// h of W x: [bits, n] of x [n, d].
Floats Hashed(const HashTrainingConfig& config, const Floats& w, const Floats& x, int64_t n,
              Multiply& multiply) {
  Floats h = multiply(w, config.bits, x, n);
  for (float& v : h) v = 1 - 2 / (1 + std::exp(config.sigma * v));
  return h;
}

// What changes h changes W x by sigma / 2 (1 - h^2) of it: g [bits, n] becomes the derivative by
// W x, and its product with x the gradient.
void AddGradient(const HashTrainingConfig& config, const Floats& h, Floats& g, const Floats& x,
                 int64_t n, int64_t d, Multiply& multiply, Floats& gradient) {
  for (size_t i = 0; i < g.size(); ++i) g[i] *= 0.5f * config.sigma * (1 - h[i] * h[i]);
  const Floats product = multiply(g, config.bits, Transposed(x, n, d), d);
  for (size_t i = 0; i < product.size(); ++i) gradient[i] += product[i];
}

// lambda |W W^T - I|_F
double AddOrthogonality(const HashTrainingConfig& config, const Floats& w, int64_t d,
                        Multiply& multiply, Floats& gradient) {
  const int64_t bits = config.bits;
  Floats e = multiply(w, bits, w, bits);
  double norm = 0;
  for (int64_t i = 0; i < bits; ++i) e[static_cast<size_t>(i * bits + i)] -= 1;
  for (const float v : e) norm += double{v} * v;
  norm = std::sqrt(norm);
  if (norm < 1e-6) return config.lambda * norm;  // no direction leads down
  const Floats product = multiply(e, bits, Transposed(w, bits, d), d);
  const auto factor = static_cast<float>(2 * config.lambda / norm);
  for (size_t i = 0; i < product.size(); ++i) gradient[i] += factor * product[i];
  return config.lambda * norm;
}

// Sums over the columns of x [rows, columns].
Floats RowSums(const Floats& x, int64_t rows, int64_t columns) {
  Floats sums;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j) sum += x[static_cast<size_t>(i * columns + j)];
    sums.push_back(static_cast<float>(sum));
  }
  return sums;
}

class BatchMaker {
 public:
  BatchMaker(const HashTrainingConfig& config, const Rows& keys, const Floats& centre,
             const SampledQueries& queries)
      : config_(config), keys_(keys), centre_(centre), queries_(queries), rng_(config.seed) {
    for (int64_t s = 0; s < queries.samples(); ++s) {
      if (2 * queries.positions[static_cast<size_t>(s)] >= keys.count()) samples_.push_back(s);
    }
    if (samples_.empty()) {
      samples_.resize(static_cast<size_t>(queries.samples()));
      std::iota(samples_.begin(), samples_.end(), 0);
    }
  }

  HashBatch Next() {
    const int64_t d = keys_.head_dim(), group = queries_.group;
    const auto drawn = std::min<int64_t>(std::max<int64_t>(1, config_.step_queries / group),
                                         static_cast<int64_t>(samples_.size()));
    // The first `drawn` of a shuffle.
    for (int64_t i = 0; i < drawn; ++i) {
      const auto rest = samples_.size() - static_cast<size_t>(i);
      std::swap(samples_[static_cast<size_t>(i)], samples_[static_cast<size_t>(i) + rng_() % rest]);
    }
    HashBatch batch;
    batch.d = d;
    batch.queries = drawn * group;
    batch.keys = std::min(config_.step_keys, keys_.count());
    batch.k.resize(static_cast<size_t>(batch.keys * d));
    std::vector<Position> at(static_cast<size_t>(batch.keys));
    for (int64_t i = 0; i < batch.keys; ++i) {
      Position& row = at[static_cast<size_t>(i)];
      row = static_cast<Position>(rng_() % static_cast<uint64_t>(keys_.count()));
      WidenToFloat(DType::kBf16, keys_.Address(row), d, &batch.k[static_cast<size_t>(i * d)]);
    }
    SubtractFromRows(centre_.data(), batch.keys, d, batch.k.data());
    for (int64_t i = 0; i < drawn; ++i) {
      const float* q = queries_.Query(samples_[static_cast<size_t>(i)], 0);
      batch.q.insert(batch.q.end(), q, q + group * d);
    }
    // Less the centre, a query's scores are all smaller by the same.
    const Floats scores = multiply_(batch.q, batch.queries, batch.k, batch.keys);
    batch.labels.resize(scores.size());
    std::vector<uint8_t> visible(static_cast<size_t>(batch.keys));
    for (int64_t j = 0; j < batch.queries; ++j) {
      const Position position =
          queries_.positions[static_cast<size_t>(samples_[static_cast<size_t>(j / group)])];
      for (size_t i = 0; i < at.size(); ++i) visible[i] = at[i] <= position;
      LabelKeys(&scores[static_cast<size_t>(j * batch.keys)], visible.data(), batch.keys,
                &batch.labels[static_cast<size_t>(j * batch.keys)]);
    }
    return batch;
  }

 private:
  const HashTrainingConfig& config_;
  const Rows& keys_;
  const Floats& centre_;
  const SampledQueries& queries_;
  std::mt19937_64 rng_;
  std::vector<int64_t> samples_;
  Multiply multiply_;
};

}  // namespace

void LabelKeys(const float* scores, const uint8_t* visible, int64_t keys, float* labels) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < keys; ++i) {
    labels[i] = visible[i] ? kOtherLabel : 0;
    if (visible[i]) order.push_back(i);
  }
  const int64_t best = (static_cast<int64_t>(order.size()) + kPositiveShare - 1) / kPositiveShare;
  std::partial_sort(order.begin(), order.begin() + best, order.end(), [&](int64_t a, int64_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  for (int64_t r = 0; r < best; ++r) {
    const float fallen = best > 1 ? static_cast<float>(r) / static_cast<float>(best - 1) : 0;
    labels[order[static_cast<size_t>(r)]] = kBestLabel - (kBestLabel - kLeastLabel) * fallen;
  }
}

double HashLoss(const HashTrainingConfig& config, const HashBatch& batch, const Floats& w,
                Floats& gradient) {
  const int64_t bits = config.bits, queries = batch.queries, keys = batch.keys;
  Multiply multiply;
  gradient.assign(w.size(), 0.0f);
  double loss = AddOrthogonality(config, w, batch.d, multiply, gradient);

  const Floats hq = Hashed(config, w, batch.q, queries, multiply);
  const Floats hk = Hashed(config, w, batch.k, keys, multiply);
  const Floats labels_t = Transposed(batch.labels, queries, keys);
  const Floats of_query = RowSums(batch.labels, queries, keys);
  const Floats of_key = RowSums(labels_t, keys, queries);
  const auto pairs = std::count_if(batch.labels.begin(), batch.labels.end(),
                                   [](float label) { return label != 0; });
  // sum_ji s_ji |a_j - b_i|^2 = sum_j (sum_i s_ji) |a_j|^2 + sum_i (sum_j s_ji) |b_i|^2
  //                             - 2 sum_j <a_j, sum_i s_ji b_i>
  Floats gq = multiply(hk, bits, batch.labels, queries);  // sum_i s_ji b_i
  Floats gk = multiply(hq, bits, labels_t, keys);
  const double weight = config.eps / static_cast<double>(std::max<int64_t>(1, pairs));
  const auto twice = static_cast<float>(2 * weight);
  double similarity = 0, balance = 0;
  for (int64_t b = 0; b < bits; ++b) {
    for (int64_t j = 0; j < queries; ++j) {
      const auto at = static_cast<size_t>(b * queries + j);
      const float own = of_query[static_cast<size_t>(j)] * hq[at];
      similarity += double{hq[at]} * (double{own} - 2 * double{gq[at]});
      gq[at] = twice * (own - gq[at]);
    }
    double mean = 0;
    for (int64_t i = 0; i < keys; ++i) mean += hk[static_cast<size_t>(b * keys + i)];
    mean /= static_cast<double>(keys);
    balance += mean * mean;
    const auto towards = static_cast<float>(2 * config.eta * mean / static_cast<double>(keys));
    for (int64_t i = 0; i < keys; ++i) {
      const auto at = static_cast<size_t>(b * keys + i);
      const float own = of_key[static_cast<size_t>(i)] * hk[at];
      similarity += double{hk[at]} * own;
      gk[at] = twice * (own - gk[at]) + towards;
    }
  }
  AddGradient(config, hq, gq, batch.q, queries, batch.d, multiply, gradient);
  AddGradient(config, hk, gk, batch.k, keys, batch.d, multiply, gradient);
  return loss + weight * similarity + config.eta * balance;
}

Floats TrainHash(const HashTrainingConfig& config, const Rows& keys, const Floats& centre,
                 const SampledQueries& queries) {
  const int64_t d = keys.head_dim();
  BatchMaker maker(config, keys, centre, queries);
  Floats w;
  for (int64_t left = config.bits; left > 0; left -= std::min(left, d)) {
    const Floats rotation = RandomRotation(std::min(left, d), d, left);
    w.insert(w.end(), rotation.begin(), rotation.end());
  }
  Floats gradient, velocity(w.size(), 0.0f);
  for (int64_t step = 0; step < config.steps(); ++step) {
    HashLoss(config, maker.Next(), w, gradient);
    for (size_t i = 0; i < w.size(); ++i) {
      velocity[i] = config.momentum * velocity[i] + gradient[i] + config.weight_decay * w[i];
      w[i] -= config.learning_rate * velocity[i];
    }
  }
  return w;
}

}  // namespace carrel::kvstore
