// What:   what references (*_ref.cc) have in common: products, attention and choices in double precision.
//         Plain loops: they are what every other version is held to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/bf16.h"

namespace carrel::kernels {

inline double RefWide(float x) { return x; }
inline double RefWide(uint16_t bf16) { return Bf16ToFloat(bf16); }

template <class A, class B>
double RefDot(const A* a, const B* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += RefWide(a[i]) * RefWide(b[i]);
  return sum;
}

// The best product that any of some queries [queries, n] has with a key.
template <class A, class B>
double RefBestDot(const A* q, int64_t queries, const B* key, int64_t n) {
  double best = -INFINITY;
  for (int64_t h = 0; h < queries; ++h) best = std::max(best, RefDot(q + h * n, key, n));
  return best;
}

// Attention of one query to `rows` rows: score(j), and value(j), its V. out [head_dim]; returns lse. Zeros and
// -inf without rows.
template <class Score, class Value>
double RefAttend(int64_t rows, int64_t head_dim, Score score, Value value, float* out) {
  std::vector<double> weight, sum(static_cast<size_t>(head_dim));
  for (int64_t j = 0; j < rows; ++j) weight.push_back(score(j));
  const double max = rows == 0 ? -INFINITY : *std::max_element(weight.begin(), weight.end());
  double total = 0;
  for (int64_t j = 0; j < rows && max > -INFINITY; ++j) {
    const double w = std::exp(weight[static_cast<size_t>(j)] - max);
    const auto* const v = value(j);
    total += w;
    for (int64_t c = 0; c < head_dim; ++c) sum[static_cast<size_t>(c)] += w * RefWide(v[c]);
  }
  for (int64_t c = 0; c < head_dim; ++c) {
    out[c] = total == 0 ? 0.0f : static_cast<float>(sum[static_cast<size_t>(c)] / total);
  }
  return total == 0 ? -INFINITY : max + std::log(total);
}

// x [head_dim] turned by sign times the angles of a position in a table (block_layout.h), and rounded: the
// bits of the kernels, each product and sum rounded by itself. As it is without a table.
template <class Table>
std::vector<float> RefTurned(const uint16_t* x, int64_t head_dim, const Table& table,
                             int64_t position, float sign) {
  const int64_t half = head_dim / 2;
  std::vector<float> turned(static_cast<size_t>(head_dim));
  for (int64_t c = 0; c < head_dim; ++c) turned[c] = Bf16ToFloat(x[c]);
  if (table.angles == nullptr) return turned;
  const float* const cosines = table.angles + std::min(position, table.positions - 1) * 2 * half;
  for (int64_t c = 0; c < half; ++c) {
    const float low = turned[c], high = turned[c + half];
    const float cosine = cosines[c], sine = sign * cosines[half + c];
    const float a = low * cosine, b = high * sine, d = high * cosine, e = low * sine;
    turned[c] = Bf16ToFloat(FloatToBf16(a - b));
    turned[c + half] = Bf16ToFloat(FloatToBf16(d + e));
  }
  return turned;
}

}  // namespace carrel::kernels
