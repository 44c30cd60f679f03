#include "kvstore/index/building/small_matrices.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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

namespace {

// Numbers that are worked on together, in registers: as pairs, which every CPU multiplies at once.
constexpr int64_t kPairs = 4, kTogether = 2 * kPairs;
struct Pack {
  double __attribute__((vector_size(16))) pairs[kPairs] = {};
};
#undef CARREL_UNROLL
#define CARREL_UNROLL _Pragma("GCC unroll 4")

Pack LoadPack(const double* from) {
  Pack pack;
  std::memcpy(pack.pairs, from, sizeof(pack.pairs));
  return pack;
}

// x += factor y
inline void AddProduct(double factor, const Pack& y, Pack& x) {
  CARREL_UNROLL
  for (int64_t p = 0; p < kPairs; ++p) x.pairs[p] += factor * y.pairs[p];
}

inline Pack Divided(Pack x, double by) {
  CARREL_UNROLL
  for (int64_t p = 0; p < kPairs; ++p) x.pairs[p] /= by;
  return x;
}

double Dot(const double* a, const double* b, int64_t n) {
  Pack sums;
  int64_t i = 0;
  for (; i + kTogether <= n; i += kTogether) {
    const Pack x = LoadPack(a + i), y = LoadPack(b + i);
    CARREL_UNROLL
    for (int64_t p = 0; p < kPairs; ++p) sums.pairs[p] += x.pairs[p] * y.pairs[p];
  }
  double sum = 0;
  CARREL_UNROLL
  for (int64_t p = 0; p < kPairs; ++p) sum += sums.pairs[p][0] + sums.pairs[p][1];
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Solves L L^T X = B for `width` columns from `b` on in place of B, whose rows are `columns` apart.
// They are worked on side by side, in `panel` [n].
void SolveColumns(const double* lower, int64_t n, double* b, int64_t width, int64_t columns,
                  Pack* panel) {
  double values[kTogether] = {};
  for (int64_t i = 0; i < n; ++i) {
    const double* const row = lower + i * n;
    std::copy_n(b + i * columns, width, values);
    Pack x = LoadPack(values);
    for (int64_t k = 0; k < i; ++k) AddProduct(-row[k], panel[k], x);
    panel[i] = Divided(x, row[i]);
  }
  for (int64_t i = n - 1; i >= 0; --i) {
    const double* const row = lower + i * n;
    const Pack x = Divided(panel[i], row[i]);
    for (int64_t k = 0; k < i; ++k) AddProduct(-row[k], x, panel[k]);
    std::memcpy(values, x.pairs, sizeof(values));
    std::copy_n(values, width, b + i * columns);
  }
}

}  // namespace

void SolveCholesky(std::vector<double>& a, int64_t n, std::vector<double>& b, int64_t columns) {
  for (int64_t i = 0; i < n; ++i) {
    double* const row = &a[static_cast<size_t>(i * n)];
    for (int64_t j = 0; j < i; ++j) {
      const double* const other = &a[static_cast<size_t>(j * n)];
      row[j] = (row[j] - Dot(row, other, j)) / other[j];
    }
    row[i] = std::sqrt(std::max(row[i] - Dot(row, row, i), 1e-30));
  }
  std::vector<Pack> panel(static_cast<size_t>(n));
  for (int64_t c = 0; c < columns; c += kTogether) {
    SolveColumns(a.data(), n, b.data() + c, std::min(kTogether, columns - c), columns,
                 panel.data());
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
  std::vector<double> sums(static_cast<size_t>(d));
  double* const sum = sums.data();
  for (int64_t i = 0; i < n; ++i) {
    const float* row = &x[static_cast<size_t>(i * d)];
    int64_t c = 0;
    for (; c + kTogether <= d; c += kTogether) {
      for (int64_t j = 0; j < kTogether; ++j) sum[c + j] += row[c + j];
    }
    for (; c < d; ++c) sum[c] += row[c];
  }
  Floats mean;
  for (double s : sums) mean.push_back(static_cast<float>(s / static_cast<double>(n)));
  return mean;
}

}  // namespace carrel::kvstore
