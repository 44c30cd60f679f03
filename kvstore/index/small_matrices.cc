#include "kvstore/index/small_matrices.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/dtype.h"

namespace carrel::kvstore {

void Orthonormalise(std::vector<double>& rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i) {
    double* row = &rows[static_cast<size_t>(i * dim)];
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < i; ++j) {
        const double* other = &rows[static_cast<size_t>(j * dim)];
        double product = 0;
        for (int64_t c = 0; c < dim; ++c) product += row[c] * other[c];
        for (int64_t c = 0; c < dim; ++c) row[c] -= product * other[c];
      }
    }
    double norm = 0;
    for (int64_t c = 0; c < dim; ++c) norm += row[c] * row[c];
    if (norm < 1e-20) continue;  // nothing is left in this direction: its bit will say nothing
    for (int64_t c = 0; c < dim; ++c) row[c] /= std::sqrt(norm);
  }
}

Floats RandomRotation(int64_t count, int64_t dim, int64_t seed) {
  static absl::Mutex mu(absl::kConstInit);
  static std::map<std::tuple<int64_t, int64_t, int64_t>, Floats> made ABSL_GUARDED_BY(mu);
  absl::MutexLock lock(&mu);
  Floats& rotation = made[{count, dim, seed}];
  if (!rotation.empty()) return rotation;
  std::mt19937_64 rng(static_cast<uint64_t>(20250727 + seed));
  std::normal_distribution<double> normal;
  std::vector<double> rows(static_cast<size_t>(count * dim));
  for (double& x : rows) x = normal(rng);
  Orthonormalise(rows, count, dim);
  rotation.assign(rows.begin(), rows.end());
  return rotation;
}

Floats Transposed(const Floats& x, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = 16;
  Floats t(x.size());
  for (int64_t i0 = 0; i0 < rows; i0 += kTile) {
    for (int64_t j0 = 0; j0 < columns; j0 += kTile) {
      for (int64_t j = j0; j < std::min(columns, j0 + kTile); ++j) {
        for (int64_t i = i0; i < std::min(rows, i0 + kTile); ++i) {
          t[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * columns + j)];
        }
      }
    }
  }
  return t;
}

void SolveCholesky(std::vector<double>& a, int64_t n, std::vector<double>& b, int64_t columns) {
  const auto at = [n](int64_t i, int64_t j) { return static_cast<size_t>(i * n + j); };
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = j; i < n; ++i) {
      double sum = a[at(i, j)];
      for (int64_t k = 0; k < j; ++k) sum -= a[at(i, k)] * a[at(j, k)];
      a[at(i, j)] = i == j ? std::sqrt(std::max(sum, 1e-30)) : sum / a[at(j, j)];
    }
  }
  const auto row = [&](int64_t i) { return &b[static_cast<size_t>(i * columns)]; };
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < i; ++k) {
      for (int64_t c = 0; c < columns; ++c) row(i)[c] -= a[at(i, k)] * row(k)[c];
    }
    for (int64_t c = 0; c < columns; ++c) row(i)[c] /= a[at(i, i)];
  }
  for (int64_t i = n - 1; i >= 0; --i) {
    for (int64_t k = i + 1; k < n; ++k) {
      for (int64_t c = 0; c < columns; ++c) row(i)[c] -= a[at(k, i)] * row(k)[c];
    }
    for (int64_t c = 0; c < columns; ++c) row(i)[c] /= a[at(i, i)];
  }
}

void SubtractFromRows(const float* from, int64_t n, int64_t d, float* x) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < d; ++c) x[i * d + c] -= from[c];
  }
}

Floats SpreadKeys(const Rows& keys, int64_t wanted) {
  const int64_t n = std::min(keys.count(), wanted), d = keys.head_dim();
  Floats x(static_cast<size_t>(n * d));
  for (int64_t i = 0; i < n; ++i) {
    WidenToFloat(DType::kBf16, keys.Address(i * keys.count() / n), d,
                 &x[static_cast<size_t>(i * d)]);
  }
  return x;
}

Floats MeanOf(const Floats& x, int64_t n, int64_t d) {
  std::vector<double> sum(static_cast<size_t>(d));
  for (int64_t i = 0; i < n; ++i) {
    const float* row = &x[static_cast<size_t>(i * d)];
    for (int64_t c = 0; c < d; ++c) sum[static_cast<size_t>(c)] += row[c];
  }
  Floats mean;
  for (double s : sum) mean.push_back(static_cast<float>(s / static_cast<double>(n)));
  return mean;
}

}  // namespace carrel::kvstore
