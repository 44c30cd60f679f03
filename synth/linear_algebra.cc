#include "synth/linear_algebra.h"

#include <algorithm>
#include <cmath>

#include "synth/random.h"

namespace carrel::synth {
namespace {

constexpr int kSubspaceSteps = 30;

// Rows of `basis` [rank, d] become orthonormal; a row that vanishes stays zero.
void Orthonormalise(std::vector<double>& basis, int64_t rank, int64_t d) {
  for (int64_t i = 0; i < rank; ++i) {
    double* row = &basis[i * d];
    for (int64_t j = 0; j < i; ++j) {
      const double* other = &basis[j * d];
      double dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += row[c] * other[c];
      for (int64_t c = 0; c < d; ++c) row[c] -= dot * other[c];
    }
    double norm = 0;
    for (int64_t c = 0; c < d; ++c) norm += row[c] * row[c];
    const double inverse = norm > 1e-24 ? 1 / std::sqrt(norm) : 0;
    for (int64_t c = 0; c < d; ++c) row[c] *= inverse;
  }
}

}  // namespace

std::vector<float> MeanOf(const std::vector<float>& rows, int64_t d) {
  std::vector<double> sum(d);
  const int64_t n = static_cast<int64_t>(rows.size()) / d;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < d; ++c) sum[c] += rows[i * d + c];
  }
  std::vector<float> mean(d);
  for (int64_t c = 0; c < d && n > 0; ++c) {
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(n));
  }
  return mean;
}

CARREL_SYNTH_WIDE
std::vector<double> CovarianceOf(const std::vector<float>& rows, int64_t d) {
  const int64_t n = static_cast<int64_t>(rows.size()) / d;
  const std::vector<float> mean = MeanOf(rows, d);
  std::vector<double> covariance(d * d);
  std::vector<double> x(d);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < d; ++c) x[c] = rows[i * d + c] - mean[c];
    for (int64_t a = 0; a < d; ++a) {
      double* out = &covariance[a * d];
      const double scale = x[a];
      for (int64_t b = 0; b < d; ++b) out[b] += scale * x[b];
    }
  }
  for (double& value : covariance) value /= static_cast<double>(std::max<int64_t>(n, 1));
  return covariance;
}

Factor Factorise(const std::vector<double>& covariance, int64_t d, int64_t rank) {
  Factor factor;
  factor.dim = d;
  factor.rank = std::min(rank, d);
  std::vector<double> basis(factor.rank * d), next(basis.size());
  for (size_t i = 0; i < basis.size(); ++i) basis[i] = Uniform(Mix(i)) - 0.5;
  Orthonormalise(basis, factor.rank, d);
  const auto multiply = [&] {
    std::fill(next.begin(), next.end(), 0);
    for (int64_t i = 0; i < factor.rank; ++i) {
      for (int64_t a = 0; a < d; ++a) {
        const double scale = basis[i * d + a];
        for (int64_t b = 0; b < d; ++b) next[i * d + b] += scale * covariance[a * d + b];
      }
    }
  };
  for (int step = 0; step < kSubspaceSteps; ++step) {
    multiply();
    basis.swap(next);
    Orthonormalise(basis, factor.rank, d);
  }
  multiply();
  factor.directions.resize(basis.size());
  factor.rest.resize(d);
  std::vector<double> left(d);
  for (int64_t c = 0; c < d; ++c) left[c] = covariance[c * d + c];
  for (int64_t i = 0; i < factor.rank; ++i) {
    double variance = 0;
    for (int64_t c = 0; c < d; ++c) variance += basis[i * d + c] * next[i * d + c];
    const double root = std::sqrt(std::max(variance, 0.0));
    for (int64_t c = 0; c < d; ++c) {
      const double x = root * basis[i * d + c];
      factor.directions[i * d + c] = static_cast<float>(x);
      left[c] -= x * x;
    }
  }
  for (int64_t c = 0; c < d; ++c) {
    factor.rest[c] = static_cast<float>(std::sqrt(std::max(left[c], 0.0)));
  }
  return factor;
}

Mahalanobis::Mahalanobis(const std::vector<float>& rows, int64_t d)
    : d_(d), mean_(MeanOf(rows, d)), cholesky_(CovarianceOf(rows, d)) {
  double trace = 0;
  for (int64_t c = 0; c < d; ++c) trace += cholesky_[c * d + c];
  // A little of the identity: a channel that never varies must not make every distance infinite.
  const double ridge = std::max(1e-4 * trace / static_cast<double>(d), 1e-30);
  for (int64_t a = 0; a < d; ++a) {
    for (int64_t b = 0; b <= a; ++b) {
      double sum = cholesky_[a * d + b] + (a == b ? ridge : 0);
      for (int64_t c = 0; c < b; ++c) sum -= cholesky_[a * d + c] * cholesky_[b * d + c];
      cholesky_[a * d + b] = a == b ? std::sqrt(std::max(sum, ridge)) : sum / cholesky_[b * d + b];
    }
  }
}

double Mahalanobis::Distance(const float* x) const {
  std::vector<double> y(d_);
  double squared = 0;
  for (int64_t a = 0; a < d_; ++a) {
    double sum = double{x[a]} - mean_[a];
    for (int64_t c = 0; c < a; ++c) sum -= cholesky_[a * d_ + c] * y[c];
    y[a] = sum / cholesky_[a * d_ + a];
    squared += y[a] * y[a];
  }
  return std::sqrt(squared);
}

}  // namespace carrel::synth
