// What:   the little linear algebra of the statistics: means, covariances, what of them is worth
//         keeping, Mahalanobis distances.
// Shapes: rows [n, d] f32, row-major.     Threads: reentrant.
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::synth {

std::vector<float> MeanOf(const std::vector<float>& rows, int64_t d);
// [d, d], about the mean; zero of no rows.
std::vector<double> CovarianceOf(const std::vector<float>& rows, int64_t d);

// A covariance as its strongest directions and what is left on the diagonal: draws are
// sum_i z[i] directions[i] + n * rest with standard normal z and n.
struct Factor {
  int64_t dim = 0;
  int64_t rank = 0;
  std::vector<float> directions;  // [rank, dim], times the root of their variance
  std::vector<float> rest;        // [dim]
};
Factor Factorise(const std::vector<double>& covariance, int64_t d, int64_t rank);

// Distances in units of a sample's own spread: sqrt((x - mean)^T C^-1 (x - mean)).
class Mahalanobis {
 public:
  Mahalanobis(const std::vector<float>& rows, int64_t d);
  double Distance(const float* x) const;

 private:
  const int64_t d_;
  std::vector<float> mean_;
  std::vector<double> cholesky_;  // lower triangle
};

}  // namespace carrel::synth
