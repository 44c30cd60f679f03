#include <algorithm>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/status.h"
#include "kernels/encode/sign_moments/sign_moments.h"
#include "kernels/score/code_score/code_score.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/building/accelerator.h"
#include "kvstore/index/building/small_matrices.h"
#include "kvstore/index/code/code.h"
#include "kvstore/index/code/code_blob.h"
#include "kvstore/index/code/hash_training.h"

namespace carrel::kvstore {
namespace {

// Keys from which mean and decoder are learned: evenly spread.
constexpr int64_t kLearnedKeys = 4096;
// Of these, keys by which the decoder is judged.
constexpr int64_t kJudgedKeys = 1024;
// Keys that are encoded together.
constexpr int64_t kEncodedKeys = 512;
// Of the mean of the diagonal: keeps the decoder's normal equations solvable.
constexpr double kRidge = 1e-4;

void MakeSigns(Floats& x) {
  for (float& s : x) s = s > 0 ? 1.0f : -1.0f;
}

// The linear map [bits, d] from the signs of y [n, bits], by which y is replaced, to x [n, d] with
// the least squared error, and its intercept [d]. mean_x: of x.
struct LinearMap {
  Floats weights, intercept;
};
LinearMap FitSigns(Floats& y, const Floats& x, const Floats& mean_x, int64_t n, int64_t bits,
                   int64_t d) {
  std::vector<int32_t> positive(static_cast<size_t>(bits)), differ(positive.size() * bits);
  kernels::AddSignMoments(y.data(), n, bits, positive.data(), differ.data());
  Floats sx(static_cast<size_t>(bits * d));
  kernels::AddOuterProducts(y.data(), bits, x.data(), d, n, sx.data());
  const auto count = static_cast<double>(n);
  Floats mean_s;
  for (const int32_t p : positive) mean_s.push_back(static_cast<float>(2 * p / count - 1));
  std::vector<double> a(differ.size()), b(sx.size());
  for (int64_t i = 0; i < bits; ++i) {
    for (int64_t j = 0; j < bits; ++j) {
      const auto at = static_cast<size_t>(i * bits + j);
      a[at] = 1 - 2 * differ[at] / count - double{mean_s[i]} * mean_s[j];
      if (i == j) a[at] += kRidge;
    }
    for (int64_t c = 0; c < d; ++c) {
      const auto at = static_cast<size_t>(i * d + c);
      b[at] = sx[at] / count - double{mean_s[i]} * mean_x[c];
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
  multiply(signs, n, {transposed_weights.data(), DType::kF32, d, bits, map.intercept.data()},
           scratch.data());
  SubtractFromRows(scratch.data(), 1, n * d, x);
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

  // Whether keys are left as they are.
  bool keeps_keys() const { return transform.empty() && stages.size() == 1; }

  // y [n, bits]: the key's bit is 1 where y > 0. x [n, d] is used up, unless keeps_keys().
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

// The encoder in one affine pass and a feedback, as accelerators take it.
CodeMap MapOf(const Encoder& encoder, int64_t bits, int64_t d) {
  CodeMap map{.bits = bits, .head_dim = d, .stage_bits = encoder.stages[0].bits};
  const bool staged = encoder.stages.size() > 1;
  if (staged) map.feedback.resize(static_cast<size_t>(bits * bits));
  Multiply multiply;
  const Floats transform_t =
      encoder.transform.empty() ? Floats() : Transposed(encoder.transform, d, d);
  Floats taken = encoder.mean;  // away from the key before a stage, whatever its bits
  for (size_t s = 0; s < encoder.stages.size(); ++s) {
    const Stage& stage = encoder.stages[s];
    const Floats matrix = transform_t.empty()
                              ? stage.directions
                              : multiply(stage.directions, stage.bits, transform_t, d);
    const auto first = static_cast<int64_t>(map.offset.size());
    map.matrix.insert(map.matrix.end(), matrix.begin(), matrix.end());
    for (const float along : multiply(taken, 1, stage.directions, stage.bits)) {
      map.offset.push_back(-along);
    }
    for (size_t t = 0; t < s; ++t) {
      const Stage& earlier = encoder.stages[t];
      const Floats said =
          multiply(stage.directions, stage.bits, earlier.decoder.weights, earlier.bits);
      for (int64_t i = 0; i < stage.bits; ++i) {
        std::copy_n(&said[static_cast<size_t>(i * earlier.bits)], earlier.bits,
                    &map.feedback[static_cast<size_t>((first + i) * bits +
                                                      static_cast<int64_t>(t) * map.stage_bits)]);
      }
    }
    for (size_t c = 0; c < stage.decoder.intercept.size(); ++c) {
      taken[c] += stage.decoder.intercept[c];
    }
  }
  return map;
}

// keys [n, d] to learn from, and their mean [d].
Encoder MakeEncoder(const Floats& keys, const Floats& mean, int64_t n, int64_t d, int64_t bits,
                    const SampledQueries* queries) {
  constexpr int64_t kTrainedStageBits = 16;
  const int64_t stage_bits = queries != nullptr ? std::min(kTrainedStageBits, d) : d;
  Encoder encoder;
  Multiply multiply;
  Floats x;  // what a stage learns from; a single random one learns nothing
  if (queries != nullptr) {
    encoder.transform = QueryTransform(*queries, d);
    x = multiply(keys, n, encoder.transform, d);
    encoder.mean = MeanOf(x, n, d);
  } else {
    encoder.mean = mean;
    if (bits > stage_bits) x = keys;
  }
  if (!x.empty()) SubtractFromRows(encoder.mean.data(), n, d, x.data());
  Floats scratch;
  for (int64_t left = bits; left > 0;) {
    Stage stage;
    stage.bits = std::min(left, stage_bits);
    stage.directions = queries != nullptr ? LargestDirections(x, n, d, stage.bits, left)
                                          : RandomRotation(stage.bits, d, left);
    if (left == bits) {
      encoder.offset = multiply(encoder.mean, 1, stage.directions, stage.bits);
      for (float& o : encoder.offset) o = -o;
    }
    left -= stage.bits;
    if (left > 0) {
      Floats signs = multiply(x, n, stage.directions, stage.bits);
      stage.decoder = FitSigns(signs, x, MeanOf(x, n, d), n, stage.bits, d);
      stage.decoder_t = Transposed(stage.decoder.weights, stage.bits, d);
      Subtract(stage.decoder, stage.decoder_t, signs.data(), n, stage.bits, d, x.data(), scratch,
               multiply);
    }
    encoder.stages.push_back(std::move(stage));
  }
  return encoder;
}

// Keeps `wanted` rows of x [n, width], evenly spread, if there are more; returns how many are left.
int64_t TakeSpread(Floats& x, int64_t n, int64_t width, int64_t wanted) {
  const int64_t rows = std::min(n, wanted);
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(&x[static_cast<size_t>(i * n / rows * width)], width,
                &x[static_cast<size_t>(i * width)]);
  }
  x.resize(static_cast<size_t>(rows * width));
  return rows;
}

// As HATA encodes: the signs of learned directions of the keys less their mean.
Encoder MakeHashEncoder(const Floats& mean, int64_t bits, const Rows& keys,
                        const SampledQueries& queries, std::vector<uint16_t>& hash) {
  const int64_t d = keys.head_dim();
  Encoder encoder;
  encoder.mean = mean;
  Stage stage{.bits = bits};
  stage.directions = TrainHash({.bits = bits}, keys, encoder.mean, queries);
  // Keys and queries are hashed with the same, as it is stored.
  hash.resize(stage.directions.size());
  FloatToBf16(stage.directions, hash.data());
  WidenToFloat(DType::kBf16, hash.data(), bits * d, stage.directions.data());
  Multiply multiply;
  encoder.offset = multiply(encoder.mean, 1, stage.directions, bits);
  for (float& o : encoder.offset) o = -o;
  encoder.stages.push_back(std::move(stage));
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
  Floats q(static_cast<size_t>(used * d));
  for (int64_t i = 0; i < used; ++i) {
    std::copy_n(&queries->queries[static_cast<size_t>(i * stride * d)], d,
                &q[static_cast<size_t>(i * d)]);
  }
  // sum_j <q, e_j>^2 = q (sum_j e_j e_j^T) q^T
  Floats moment(static_cast<size_t>(d * d));
  kernels::AddOuterProducts(errors.data(), d, errors.data(), d, n, moment.data());
  const Floats products = multiply(q, used, moment, d);
  double sum = 0;
  for (int64_t i = 0; i < used; ++i) {
    double norm = 0, squares = 0;
    for (int64_t c = 0; c < d; ++c) {
      norm += double{q[i * d + c]} * q[i * d + c];
      squares += double{q[i * d + c]} * products[i * d + c];
    }
    // Of a sum of squares; rounding may take it below zero.
    if (norm > 0) sum += std::max(squares, 0.0) / norm / static_cast<double>(n);
  }
  return static_cast<float>(sum / static_cast<double>(used));
}

// All keys, into blocks.
void EncodeKeys(Encoder& encoder, const Rows& keys, int64_t bits, char* blocks) {
  const int64_t d = keys.head_dim(), block_bytes = kernels::CodeBlockBytes(bits);
  Floats wide(static_cast<size_t>(kEncodedKeys * d)), y(static_cast<size_t>(kEncodedKeys * bits));
  for (Position at = 0; at < keys.count(); at += kEncodedKeys) {
    const int64_t count = std::min(kEncodedKeys, keys.count() - at);
    keys.ForEachPiece({at, at + count}, [&](Position first, const void* rows, int64_t part) {
      WidenToFloat(DType::kBf16, rows, part * d, &wide[static_cast<size_t>((first - at) * d)]);
    });
    encoder(wide.data(), count, d, bits, y.data());
    for (int64_t i = 0; i < count; i += kernels::kCodeBlockKeys) {
      kernels::PackCodes(&y[static_cast<size_t>(i * bits)],
                         std::min(kernels::kCodeBlockKeys, count - i), bits,
                         blocks + (at + i) / kernels::kCodeBlockKeys * block_bytes);
    }
  }
}

}  // namespace

absl::StatusOr<std::string> BuildCode(const IndexParams& params, const Rows& keys,
                                      const SampledQueries* queries, Accelerator* accelerator) {
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  const int64_t d = keys.head_dim(), bits = params.code_bits;
  if (queries != nullptr && queries->head_dim != d) {
    return absl::InvalidArgumentError(
        absl::StrCat("code: queries of head_dim ", queries->head_dim, " for keys of head_dim ", d));
  }
  if (params.code_training != CodeTraining::kOff &&
      (queries == nullptr || queries->queries.empty())) {
    return absl::InvalidArgumentError("code: training needs sampled queries, none were given");
  }
  CodeHeader header{
      .rows = keys.count(), .head_dim = d, .bits = bits, .training = params.code_training};
  ASSIGN_OR_RETURN(header.rows_crc, RowsCrc(keys, kCodeCheckedRows));
  CodeDecoder decoder;
  decoder.centre.resize(static_cast<size_t>(d));
  decoder.decoder.resize(static_cast<size_t>(bits * d));
  const bool hata = params.code_training == CodeTraining::kHata;
  if (hata) decoder.hash.resize(decoder.decoder.size());
  if (keys.count() == 0) return EncodeCodeBlob(header, decoder);

  Floats x = SpreadKeys(keys, kLearnedKeys);
  const int64_t n = static_cast<int64_t>(x.size()) / d;
  const bool staged = params.code_training == CodeTraining::kStaged;
  const Floats mean = MeanOf(x, n, d);
  Encoder encoder = hata ? MakeHashEncoder(mean, bits, keys, *queries, decoder.hash)
                         : MakeEncoder(x, mean, n, d, bits, staged ? queries : nullptr);
  Floats signs(static_cast<size_t>(n * bits));
  if (encoder.keeps_keys()) {
    encoder(x.data(), n, d, bits, signs.data());
  } else {
    Floats used = x;
    encoder(used.data(), n, d, bits, signs.data());
  }
  LinearMap map = FitSigns(signs, x, mean, n, bits, d);
  FloatToBf16(map.weights, decoder.decoder.data());
  WidenToFloat(DType::kBf16, decoder.decoder.data(), bits * d, map.weights.data());
  decoder.centre = map.intercept;
  Multiply multiply;
  Floats scratch;
  const int64_t judged = TakeSpread(x, n, d, kJudgedKeys);
  TakeSpread(signs, n, bits, kJudgedKeys);
  Subtract(map, Transposed(map.weights, bits, d), signs.data(), judged, bits, d, x.data(), scratch,
           multiply);
  header.error_ratio = ErrorRatio(x, judged, d, queries);

  std::string blob = EncodeCodeBlob(header, decoder);
  const auto header_bytes = blob.size();
  const int64_t blocks = (keys.count() + kernels::kCodeBlockKeys - 1) / kernels::kCodeBlockKeys;
  blob.resize(header_bytes + static_cast<size_t>(blocks * kernels::CodeBlockBytes(bits)));
  char* const out = &blob[header_bytes];
  if (accelerator != nullptr) {
    const absl::Status status = accelerator->EncodeKeys(MapOf(encoder, bits, d), keys, out);
    if (status.ok()) return blob;
    if (!absl::IsUnimplemented(status)) return Annotate(status, "code");
  }
  EncodeKeys(encoder, keys, bits, out);
  return blob;
}

}  // namespace carrel::kvstore
