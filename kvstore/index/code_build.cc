#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <tuple>
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
constexpr int64_t kLearnedKeys = 4096;
// Keys that are encoded together.
constexpr int64_t kEncodedKeys = 512;
// Of the mean of the diagonal: keeps the decoder's normal equations solvable.
constexpr double kRidge = 1e-4;

// Gram and Schmidt, twice is enough for rounding's sake.
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

// A random rotation, [count, dim] of its rows; the same in every build.
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

class Multiply {
 public:
  // y [n, w.out] = x [n, w.in] w^T
  void operator()(const float* x, int64_t n, const kernels::WeightMatrix& w, float* y) {
    scratch_.resize(static_cast<size_t>(kernels::LinearScratchFloats(w)));
    kernels::Linear(x, n, w.in, w, y, w.out, scratch_.data());
  }
  Floats operator()(const Floats& x, int64_t n, const Floats& w, int64_t out) {
    Floats y(static_cast<size_t>(n * out));
    (*this)(x.data(), n, {w.data(), DType::kF32, out, static_cast<int64_t>(x.size()) / n},
            y.data());
    return y;
  }

 private:
  Floats scratch_;
};

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

void SubtractFromRows(const float* from, int64_t n, int64_t d, float* x) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < d; ++c) x[i * d + c] -= from[c];
  }
}

void MakeSigns(Floats& x) {
  for (float& s : x) s = s > 0 ? 1.0f : -1.0f;
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

// The linear map [bits, d] from signs [n, bits] to x [n, d] with the least squared error, and its
// intercept [d].
struct LinearMap {
  Floats weights, intercept;
};
LinearMap FitSigns(const Floats& signs, const Floats& x, int64_t n, int64_t bits, int64_t d) {
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
  LinearMap map{Floats(b.begin(), b.end()), mean_x};
  for (int64_t i = 0; i < bits; ++i) {
    for (int64_t c = 0; c < d; ++c) map.intercept[c] -= mean_s[i] * map.weights[i * d + c];
  }
  return map;
}

// x -= what the signs say.
void Subtract(const LinearMap& map, const Floats& transposed_weights, const float* signs, int64_t n,
              int64_t bits, int64_t d, float* x, Floats& scratch, Multiply& multiply) {
  scratch.resize(static_cast<size_t>(n * d));
  multiply(signs, n, {transposed_weights.data(), DType::kF32, d, bits}, scratch.data());
  for (int64_t i = 0; i < n; ++i) {
    float* row = x + i * d;
    const float* said = &scratch[static_cast<size_t>(i * d)];
    for (int64_t c = 0; c < d; ++c) row[c] -= said[c] + map.intercept[static_cast<size_t>(c)];
  }
}

// E <q, r>^2 = |transform r|^2 for queries of this second moment: its Cholesky factor, transposed.
// A share of all directions is kept equally important: queries to come are not those sampled.
Floats QueryTransform(const SampledQueries& queries, int64_t d) {
  constexpr double kShare = 0.3;
  const auto count = static_cast<int64_t>(queries.queries.size()) / d;
  Multiply multiply;
  const Floats qt = Transposed(queries.queries, count, d);
  const Floats moment = multiply(qt, d, qt, d);
  double trace = 0;
  for (int64_t c = 0; c < d; ++c) trace += moment[c * d + c];
  std::vector<double> a(moment.begin(), moment.end());
  for (int64_t c = 0; c < d; ++c) a[c * d + c] += kShare * trace / static_cast<double>(d) + 1e-12;
  std::vector<double> none;
  SolveCholesky(a, d, none, 0);
  Floats transform(static_cast<size_t>(d * d));
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = i; j < d; ++j) transform[i * d + j] = static_cast<float>(a[j * d + i]);
  }
  return transform;
}

// Directions [count, d] in which x [n, d] varies most, turned among themselves so that each carries
// as much as the next.
Floats LargestDirections(const Floats& x, int64_t n, int64_t d, int64_t count, int64_t seed) {
  constexpr int kIterations = 8;
  Multiply multiply;
  const Floats xt = Transposed(x, n, d);
  const Floats moment = multiply(xt, d, xt, d);
  Floats v = RandomRotation(count, d, seed);
  std::vector<double> next(v.size());
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    const Floats product = multiply(v, count, moment, d);
    next.assign(product.begin(), product.end());
    Orthonormalise(next, count, d);
    v.assign(next.begin(), next.end());
  }
  return multiply(RandomRotation(count, count, seed), count, Transposed(v, count, d), d);
}

// How keys become bits.
struct Stage {
  int64_t bits = 0;
  Floats directions;  // [bits, d]
  LinearMap decoder;  // of this stage's bits
  Floats decoder_t;   // [d, bits]
};
struct Encoder {
  Floats transform;  // [d, d], or empty: none
  Floats mean;       // [d], after the transform
  Floats offset;     // of the first stage's products: its directions times -mean
  std::vector<Stage> stages;

  // y [n, bits]: the key's bit is 1 where y > 0. x [n, d] is used up.
  void operator()(float* x, int64_t n, int64_t d, int64_t bits, float* y) {
    if (!transform.empty()) {
      scratch_.resize(static_cast<size_t>(n * d));
      multiply_(x, n, {transform.data(), DType::kF32, d, d}, scratch_.data());
      std::copy_n(scratch_.data(), n * d, x);
    }
    int64_t first = 0;
    for (const Stage& stage : stages) {
      const kernels::WeightMatrix w{stage.directions.data(), DType::kF32, stage.bits, d,
                                    first == 0 ? offset.data() : nullptr};
      if (stage.bits == bits) {
        multiply_(x, n, w, y);
        return;
      }
      signs_.resize(static_cast<size_t>(n * stage.bits));
      multiply_(x, n, w, signs_.data());
      MakeSigns(signs_);
      for (int64_t i = 0; i < n; ++i) {
        std::copy_n(&signs_[static_cast<size_t>(i * stage.bits)], stage.bits, y + i * bits + first);
      }
      if (first == 0) SubtractFromRows(mean.data(), n, d, x);
      first += stage.bits;
      if (first < bits) {
        Subtract(stage.decoder, stage.decoder_t, signs_.data(), n, stage.bits, d, x, scratch_,
                 multiply_);
      }
    }
  }

 private:
  Multiply multiply_;
  Floats scratch_, signs_;
};

// x [n, d]: keys to learn from.
Encoder MakeEncoder(Floats x, int64_t n, int64_t d, int64_t bits, const SampledQueries* queries) {
  constexpr int64_t kTrainedStageBits = 16;
  Encoder encoder;
  Multiply multiply;
  if (queries != nullptr) {
    encoder.transform = QueryTransform(*queries, d);
    x = multiply(x, n, encoder.transform, d);
  }
  encoder.mean = MeanOf(x, n, d);
  SubtractFromRows(encoder.mean.data(), n, d, x.data());
  Floats scratch;
  for (int64_t left = bits; left > 0;) {
    Stage stage;
    stage.bits = std::min(left, queries != nullptr ? std::min(kTrainedStageBits, d) : d);
    stage.directions = queries != nullptr ? LargestDirections(x, n, d, stage.bits, left)
                                          : RandomRotation(stage.bits, d, left);
    if (left == bits) {
      encoder.offset = multiply(encoder.mean, 1, stage.directions, stage.bits);
      for (float& o : encoder.offset) o = -o;
    }
    left -= stage.bits;
    if (left > 0) {
      Floats signs = multiply(x, n, stage.directions, stage.bits);
      MakeSigns(signs);
      stage.decoder = FitSigns(signs, x, n, stage.bits, d);
      stage.decoder_t = Transposed(stage.decoder.weights, stage.bits, d);
      Subtract(stage.decoder, stage.decoder_t, signs.data(), n, stage.bits, d, x.data(), scratch,
               multiply);
    }
    encoder.stages.push_back(std::move(stage));
  }
  return encoder;
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
    std::copy_n(&queries->queries[static_cast<size_t>(i * stride * d)], d,
                &q[static_cast<size_t>(i * d)]);
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(&errors[static_cast<size_t>(i * n / rows * d)], d, &e[static_cast<size_t>(i * d)]);
  }
  const Floats products = multiply(q, used, e, rows);
  double sum = 0;
  for (int64_t i = 0; i < used; ++i) {
    double norm = 0, squares = 0;
    for (int64_t c = 0; c < d; ++c) norm += double{q[i * d + c]} * q[i * d + c];
    for (int64_t j = 0; j < rows; ++j)
      squares += double{products[i * rows + j]} * products[i * rows + j];
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
    return absl::InvalidArgumentError(
        absl::StrCat("code: queries of head_dim ", queries->head_dim, " for keys of head_dim ", d));
  }
  if (params.code_trained && (queries == nullptr || queries->queries.empty())) {
    return absl::InvalidArgumentError("code: training needs sampled queries, none were given");
  }
  CodeHeader header{
      .rows = keys.count(), .head_dim = d, .bits = bits, .trained = params.code_trained};
  ASSIGN_OR_RETURN(header.rows_crc, RowsCrc(keys, kCodeCheckedRows));
  CodeDecoder decoder;
  decoder.centre.resize(static_cast<size_t>(d));
  decoder.decoder.resize(static_cast<size_t>(bits * d));
  if (keys.count() == 0) return EncodeCodeBlob(header, decoder);

  Floats x = SpreadKeys(keys, kLearnedKeys);
  const int64_t n = static_cast<int64_t>(x.size()) / d;
  Encoder encoder = MakeEncoder(x, n, d, bits, params.code_trained ? queries : nullptr);
  Floats signs(static_cast<size_t>(n * bits));
  {
    Floats used = x;
    encoder(used.data(), n, d, bits, signs.data());
    MakeSigns(signs);
  }
  LinearMap map = FitSigns(signs, x, n, bits, d);
  FloatToBf16(map.weights, decoder.decoder.data());
  WidenToFloat(DType::kBf16, decoder.decoder.data(), bits * d, map.weights.data());
  decoder.centre = map.intercept;
  Multiply multiply;
  Floats scratch;
  Subtract(map, Transposed(map.weights, bits, d), signs.data(), n, bits, d, x.data(), scratch,
           multiply);
  header.error_ratio = ErrorRatio(x, n, d, queries);

  std::string blob = EncodeCodeBlob(header, decoder);
  const int64_t block_bytes = kernels::CodeBlockBytes(bits);
  blob.reserve(blob.size() +
               static_cast<size_t>((keys.count() / kernels::kCodeBlockKeys + 1) * block_bytes));
  Floats wide(static_cast<size_t>(kEncodedKeys * d)), y(static_cast<size_t>(kEncodedKeys * bits));
  std::string block(static_cast<size_t>(block_bytes), '\0');
  for (Position at = 0; at < keys.count(); at += kEncodedKeys) {
    const int64_t count = std::min(kEncodedKeys, keys.count() - at);
    keys.ForEachPiece({at, at + count}, [&](Position first, const void* rows, int64_t part) {
      WidenToFloat(DType::kBf16, rows, part * d, &wide[static_cast<size_t>((first - at) * d)]);
    });
    encoder(wide.data(), count, d, bits, y.data());
    for (int64_t i = 0; i < count; i += kernels::kCodeBlockKeys) {
      kernels::PackCodes(&y[static_cast<size_t>(i * bits)],
                         std::min(kernels::kCodeBlockKeys, count - i), bits, block.data());
      blob.append(block);
    }
  }
  return blob;
}

}  // namespace carrel::kvstore
