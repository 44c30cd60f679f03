#define HWY_WANT_AVX3_DL 1  // as int8_score.cc, whose targets are all tested

#include "kernels/score/int8_score/int8_score.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST_WITH_AMX(Int8ScoreTest);

struct Packed {
  std::vector<float> rows;  // [count, dim]
  std::vector<uint8_t> bytes;
  const uint8_t* blocks() const { return bytes.data() + 1; }  // any address
};

Packed PackRows(std::vector<float> rows, int64_t count, int64_t dim) {
  const int64_t blocks = (count + kInt8BlockRows - 1) / kInt8BlockRows;
  Packed packed{std::move(rows),
                std::vector<uint8_t>(static_cast<size_t>(blocks * Int8BlockBytes(dim) + 1), 0xff)};
  for (int64_t i = 0; i < blocks; ++i) {
    PackInt8(packed.rows.data() + i * kInt8BlockRows * dim,
             std::min(kInt8BlockRows, count - i * kInt8BlockRows), dim,
             packed.bytes.data() + 1 + i * Int8BlockBytes(dim));
  }
  return packed;
}

TEST_P(Int8ScoreTest, RandomShapes_EqualReferenceAndAreWithinTheBoundOfTheProduct) {
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t dims[] = {1, 3, 24, 64, 80, 96, 128, 512, 1 + Below(300)};
    const int64_t dim = dims[Below(9)], count = Below(130);
    const int64_t group = 1 + Below(trial % 3 == 0 ? 140 : 20);
    SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group) + " rows " +
                 std::to_string(count));
    std::vector<float> rows = RandomNormal(rng_, count * dim);
    if (count > 2) std::fill_n(rows.begin(), dim, 0.0f);   // a row of zeros
    if (count > 2) rows[static_cast<size_t>(dim)] = 1000;  // one large number
    const Packed packed = PackRows(std::move(rows), count, dim);
    std::vector<float> q = RandomNormal(rng_, group * dim);
    if (group > 1) std::fill_n(q.begin(), dim, 0.0f);
    const float scale = 0.125f;
    Int8Queries queries;
    MakeInt8Queries(q.data(), group, dim, scale, queries);
    const int64_t blocks = (count + kInt8BlockRows - 1) / kInt8BlockRows;
    const int64_t stride = blocks * kInt8BlockRows + Below(3);
    GuardedFloats out(group * stride), expected(group * stride);
    Int8Score(queries, packed.blocks(), blocks, out.data(), stride);
    RefInt8Score(queries, packed.blocks(), blocks, expected.data(), stride);
    for (int64_t h = 0; h < group; ++h) {
      const float* query = q.data() + h * dim;
      double sum_of_query = 0, largest = 0;
      for (int64_t c = 0; c < dim; ++c) {
        sum_of_query += std::abs(query[c]);
        largest = std::max(largest, std::abs(double{query[c]}));
      }
      for (int64_t j = 0; j < blocks * kInt8BlockRows; ++j) {
        const float got = out.data()[h * stride + j];
        ASSERT_EQ(got, expected.data()[h * stride + j]);
        if (j >= count) {
          ASSERT_EQ(got, 0);
          continue;
        }
        const float* row = &packed.rows[static_cast<size_t>(j * dim)];
        double product = 0, sum_of_row = 0, peak = 0;
        for (int64_t c = 0; c < dim; ++c) {
          product += double{query[c]} * row[c];
          sum_of_row += std::abs(row[c]);
          peak = std::max(peak, std::abs(double{row[c]}));
        }
        // Half a step of the row by each number of the query, half a step of the query by each
        // number of the row (and what both make).
        const double most = std::min(32767.0, std::floor(2147483647.0 / (127.0 * dim)));
        const double bound = scale * (0.501 * peak / 127 * sum_of_query +
                                      0.501 * largest / most * (sum_of_row + dim * peak / 254));
        ASSERT_NEAR(got, scale * product, bound + 1e-5 * std::abs(scale * product) + 1e-9);
      }
    }
  }
}

TEST_P(Int8ScoreTest, PackInt8_EqualsReferenceAndItsErrorBoundsScores) {
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t dims[] = {1, 3, 24, 64, 128, 512, 1 + Below(300)};
    const int64_t dim = dims[Below(7)], count = 1 + Below(kInt8BlockRows);
    SCOPED_TRACE("dim " + std::to_string(dim) + " rows " + std::to_string(count));
    std::vector<float> rows = RandomNormal(rng_, count * dim);
    if (count > 2) std::fill_n(rows.begin(), dim, 0.0f);
    if (count > 2 && trial % 2 == 0) rows[static_cast<size_t>(dim)] = 40;  // an outlier
    std::vector<char> block(static_cast<size_t>(Int8BlockBytes(dim))), expected = block;
    const Int8Error error = PackInt8(rows.data(), count, dim, block.data());
    const Int8Error reference = RefPackInt8(rows.data(), count, dim, expected.data());
    ASSERT_EQ(block, expected);
    EXPECT_GE(error.residual, reference.residual);
    EXPECT_GE(error.norm, reference.norm);
    EXPECT_LE(error.residual, 1.001f * reference.residual + 1e-6f * reference.norm);
    EXPECT_LE(error.norm, 1.001f * reference.norm);

    const std::vector<float> q = RandomNormal(rng_, dim);
    Int8Queries queries;
    MakeInt8Queries(q.data(), 1, dim, 0.125f, queries);
    std::vector<float> scores(kInt8BlockRows);
    Int8Score(queries, block.data(), 1, scores.data(), kInt8BlockRows);
    double norm = 0;
    for (const float x : q) norm += double{x} * x;
    const float bound = Int8ScoreError(error, static_cast<float>(std::sqrt(norm)), dim, 0.125f);
    double worst = 0;
    for (int64_t j = 0; j < count; ++j) {
      double product = 0;
      for (int64_t c = 0; c < dim; ++c) {
        product += double{q[static_cast<size_t>(c)]} * rows[static_cast<size_t>(j * dim + c)];
      }
      worst = std::max(worst, std::abs(scores[static_cast<size_t>(j)] - 0.125 * product));
    }
    EXPECT_LE(worst, bound);
  }
}

TEST_P(Int8ScoreTest, Int8ScoreError_IsReachedByAQueryAlongTheResidual) {
  const int64_t dim = 64;
  std::vector<float> row = RandomNormal(rng_, dim);
  std::vector<char> block(static_cast<size_t>(Int8BlockBytes(dim)));
  const Int8Error error = PackInt8(row.data(), 1, dim, block.data());
  float scale;
  std::memcpy(&scale, block.data(), sizeof(scale));
  std::vector<float> q(row.size());
  double norm = 0, product = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const auto i = static_cast<size_t>(c);
    const auto number = static_cast<int8_t>(block[static_cast<size_t>(64 + c / 4 * 64 + c % 4)]);
    q[i] = row[i] - static_cast<float>(number) * scale;
    norm += double{q[i]} * q[i];
    product += double{q[i]} * row[i];
  }
  Int8Queries queries;
  MakeInt8Queries(q.data(), 1, dim, 1.0f, queries);
  std::vector<float> scores(kInt8BlockRows);
  Int8Score(queries, block.data(), 1, scores.data(), kInt8BlockRows);
  const float bound = Int8ScoreError(error, static_cast<float>(std::sqrt(norm)), dim, 1.0f);
  EXPECT_GT(std::abs(scores[0] - product), 0.9 * bound);
  EXPECT_LE(std::abs(scores[0] - product), bound);
}

TEST_P(Int8ScoreTest, LargestNumbersEverywhere_DoNotOverflow) {
  for (const int64_t dim : {128, 512, 4096}) {
    const Packed packed =
        PackRows(std::vector<float>(static_cast<size_t>(16 * dim), -3.0f), 16, dim);
    const std::vector<float> q(static_cast<size_t>(dim), -2.0f);
    Int8Queries queries;
    MakeInt8Queries(q.data(), 1, dim, 1.0f, queries);
    std::vector<float> out(kInt8BlockRows);
    Int8Score(queries, packed.blocks(), 1, out.data(), kInt8BlockRows);
    for (const float score : out) EXPECT_NEAR(score, 6.0f * dim, 6.0f * dim * 1e-5);
  }
}

}  // namespace
}  // namespace carrel::kernels
