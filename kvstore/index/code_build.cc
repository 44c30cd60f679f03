#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/code_score/code_score.h"
#include "kernels/linear/linear.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/code.h"
#include "kvstore/index/code_blob.h"
#include "kvstore/index/hnsw_links.h"

namespace carrel::kvstore {
namespace {

using Floats = std::vector<float>;

// Keys from which mean and decoder are learned: evenly spread.
constexpr int64_t kLearnedKeys = 8192;
// Keys that are encoded together.
constexpr int64_t kEncodedKeys = 512;
// Of the mean of the diagonal: keeps the decoder's normal equations solvable.
constexpr double kRidge = 1e-4;

// Rows of random rotations, orthonormal within each head_dim of them; the same in every build.
Floats RandomDirections(int64_t bits, int64_t dim) {
  static absl::Mutex mu(absl::kConstInit);
  static std::map<std::pair<int64_t, int64_t>, Floats> made ABSL_GUARDED_BY(mu);
  absl::MutexLock lock(&mu);
  Floats& directions = made[{bits, dim}];
  if (!directions.empty()) return directions;
  std::mt19937_64 rng(20250727);
  std::normal_distribution<double> normal;
  directions.resize(static_cast<size_t>(bits * dim));
  std::vector<double> rows(directions.size());
  for (int64_t i = 0; i < bits; ++i) {
    double* row = &rows[static_cast<size_t>(i * dim)];
    for (int64_t c = 0; c < dim; ++c) row[c] = normal(rng);
    for (int64_t j = i / dim * dim; j < i; ++j) {
      const double* other = &rows[static_cast<size_t>(j * dim)];
      double product = 0;
      for (int64_t c = 0; c < dim; ++c) product += row[c] * other[c];
      for (int64_t c = 0; c < dim; ++c) row[c] -= product * other[c];
    }
    double norm = 0;
    for (int64_t c = 0; c < dim; ++c) norm += row[c] * row[c];
    for (int64_t c = 0; c < dim; ++c) row[c] /= std::sqrt(norm);
  }
  std::copy(rows.begin(), rows.end(), directions.begin());
  return directions;
}

class Multiply {
 public:
  // y [n, w.out] = x [n, w.in] w^T
  void operator()(const float* x, int64_t n, const kernels::WeightMatrix& w, float* y) {
    scratch_.resize(static_cast<size_t>(kernels::LinearScratchFloats(w)));
    kernels::Linear(x, n, w.in, w, y, w.out, scratch_.data());
  }
  Floats operator()(const Floats& x, int64_t n, const Floats& w, int64_t out) {
    Floats y(static_cast<size_t>(n * out));
    (*this)(x.data(), n, {w.data(), DType::kF32, out, static_cast<int64_t>(x.size()) / n}, y.data());
    return y;
  }

 private:
  Floats scratch_;
};

Floats Transposed(const Floats& x, int64_t rows, int64_t columns) {
  Floats t(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      t[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * columns + j)];
    }
  }
  return t;
}

// Solves A X = B in place of B, for a symmetric positive definite A [n, n]; B [n, columns].
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
  for (int64_t i = 0; i < n * d; ++i) sum[static_cast<size_t>(i % d)] += x[static_cast<size_t>(i)];
  Floats mean;
  for (double s : sum) mean.push_back(static_cast<float>(s / static_cast<double>(n)));
  return mean;
}

// The linear map from bits to keys with the least squared error over the keys x [n, d]; its
// intercept is the centre. Leaves x as what it gets wrong.
void FitDecoder(Floats& x, const Floats& signs, int64_t n, int64_t d, int64_t bits,
                CodeDirections& directions) {
  Multiply multiply;
  const Floats mean_x = MeanOf(x, n, d), mean_s = MeanOf(signs, n, bits);
  const Floats st = Transposed(signs, n, bits), xt = Transposed(x, n, d);
  const Floats ss = multiply(st, bits, st, bits), sx = multiply(st, bits, xt, d);
  std::vector<double> a(ss.size()), b(sx.size());
  for (int64_t i = 0; i < bits; ++i) {
    for (int64_t j = 0; j < bits; ++j) {
      const auto at = static_cast<size_t>(i * bits + j);
      a[at] = ss[at] / static_cast<double>(n) - double{mean_s[i]} * mean_s[j];
      if (i == j) a[at] += kRidge;
    }
    for (int64_t c = 0; c < d; ++c) {
      const auto at = static_cast<size_t>(i * d + c);
      b[at] = sx[at] / static_cast<double>(n) - double{mean_s[i]} * mean_x[c];
    }
  }
  SolveCholesky(a, bits, b, d);
  Floats decoder(b.begin(), b.end());
  directions.decoder.resize(decoder.size());
  FloatToBf16(decoder, directions.decoder.data());
  WidenToFloat(DType::kBf16, directions.decoder.data(), bits * d, decoder.data());
  directions.centre = mean_x;
  for (int64_t i = 0; i < bits; ++i) {
    for (int64_t c = 0; c < d; ++c) {
      directions.centre[c] -= mean_s[i] * decoder[static_cast<size_t>(i * d + c)];
    }
  }
  const Floats decoded = multiply(signs, n, Transposed(decoder, bits, d), d);
  for (int64_t i = 0; i < n * d; ++i) {
    x[static_cast<size_t>(i)] -= decoded[static_cast<size_t>(i)] + directions.centre[i % d];
  }
}

// E <q, e>^2 / |q|^2 over the queries, or over all directions if there are none.
float ErrorRatio(const Floats& errors, int64_t n, int64_t d, const SampledQueries* queries) {
  if (n == 0) return 0;
  if (queries == nullptr || queries->queries.empty()) {
    double sum = 0;
    for (float e : errors) sum += double{e} * e;
    return static_cast<float>(sum / static_cast<double>(n * d));
  }
  Multiply multiply;
  const auto count = static_cast<int64_t>(queries->queries.size()) / d;
  const int64_t used = std::min<int64_t>(count, 256), stride = count / used;
  const int64_t rows = std::min<int64_t>(n, 1024);
  Floats q(static_cast<size_t>(used * d)), e(static_cast<size_t>(rows * d));
  for (int64_t i = 0; i < used; ++i) {
    std::copy_n(&queries->queries[static_cast<size_t>(i * stride * d)], d, &q[static_cast<size_t>(i * d)]);
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(&errors[static_cast<size_t>(i * n / rows * d)], d, &e[static_cast<size_t>(i * d)]);
  }
  const Floats products = multiply(q, used, e, rows);
  double sum = 0;
  for (int64_t i = 0; i < used; ++i) {
    double norm = 0, squares = 0;
    for (int64_t c = 0; c < d; ++c) norm += double{q[i * d + c]} * q[i * d + c];
    for (int64_t j = 0; j < rows; ++j) squares += double{products[i * rows + j]} * products[i * rows + j];
    if (norm > 0) sum += squares / norm / static_cast<double>(rows);
  }
  return static_cast<float>(sum / static_cast<double>(used));
}

}  // namespace

absl::StatusOr<std::string> BuildCode(const IndexParams& params, const Rows& keys,
                                      const SampledQueries* queries) {
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  const int64_t d = keys.head_dim(), bits = params.code_bits;
  if (queries != nullptr && queries->head_dim != d) {
    return absl::InvalidArgumentError(absl::StrCat("code: queries of head_dim ", queries->head_dim,
                                                   " for keys of head_dim ", d));
  }
  CodeHeader header{.rows = keys.count(), .head_dim = d, .bits = bits};
  ASSIGN_OR_RETURN(header.rows_crc, RowsCrc(keys, kCodeCheckedRows));
  CodeDirections directions;
  directions.centre.resize(static_cast<size_t>(d));
  directions.decoder.resize(static_cast<size_t>(bits * d));
  if (keys.count() == 0) return EncodeCodeBlob(header, directions);

  Floats x = SpreadKeys(keys, kLearnedKeys);
  const int64_t n = static_cast<int64_t>(x.size()) / d;
  const Floats encoder = RandomDirections(bits, d);
  Multiply multiply;
  const Floats mean = MeanOf(x, n, d);
  Floats minus_thresholds(static_cast<size_t>(bits));
  for (int64_t i = 0; i < bits; ++i) {
    for (int64_t c = 0; c < d; ++c) minus_thresholds[i] -= encoder[i * d + c] * mean[c];
  }
  const kernels::WeightMatrix w{encoder.data(), DType::kF32, bits, d, minus_thresholds.data()};

  Floats signs(static_cast<size_t>(n * bits));
  multiply(x.data(), n, w, signs.data());
  for (float& s : signs) s = s > 0 ? 1.0f : -1.0f;
  FitDecoder(x, signs, n, d, bits, directions);
  header.error_ratio = ErrorRatio(x, n, d, queries);

  std::string blob = EncodeCodeBlob(header, directions);
  const int64_t block_bytes = kernels::CodeBlockBytes(bits);
  blob.reserve(blob.size() + static_cast<size_t>((keys.count() / kernels::kCodeBlockKeys + 1) * block_bytes));
  Floats wide(static_cast<size_t>(kEncodedKeys * d)), y(static_cast<size_t>(kEncodedKeys * bits));
  std::string block(static_cast<size_t>(block_bytes), '\0');
  for (Position at = 0; at < keys.count(); at += kEncodedKeys) {
    const int64_t count = std::min(kEncodedKeys, keys.count() - at);
    keys.ForEachPiece({at, at + count}, [&](Position first, const void* rows, int64_t part) {
      WidenToFloat(DType::kBf16, rows, part * d, &wide[static_cast<size_t>((first - at) * d)]);
    });
    multiply(wide.data(), count, w, y.data());
    for (int64_t i = 0; i < count; i += kernels::kCodeBlockKeys) {
      kernels::PackCodes(&y[static_cast<size_t>(i * bits)],
                         std::min(kernels::kCodeBlockKeys, count - i), bits, block.data());
      blob.append(block);
    }
  }
  return blob;
}

}  // namespace carrel::kvstore
