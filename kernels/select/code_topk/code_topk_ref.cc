#include "kernels/reference.h"
#include "kernels/select/code_topk/code_topk.h"

namespace carrel::kernels {
namespace {

// [rows]
std::vector<double> ScoresOfHead(const CodeTopKParams& p, int64_t g, int64_t h) {
  std::vector<double> u(static_cast<size_t>(p.bits));
  double most = 0;
  for (int64_t i = 0; i < p.bits; ++i) {
    u[static_cast<size_t>(i)] =
        p.scale * RefDot(p.q + (g * p.group + h) * p.head_dim,
                         p.decoder + (g * p.bits + i) * p.head_dim, p.head_dim);
    most = std::max(most, std::abs(u[static_cast<size_t>(i)]));
  }
  const double unit = most / kCodeTopKWeight;
  double sizes = 0;
  for (double& x : u) {
    x = unit == 0 ? 0 : std::nearbyint(x / unit);
    sizes += std::abs(x);
  }
  const double step = std::min(unit, kCodeTopKMost / std::max(sizes, 1.0));
  std::vector<double> scores;
  for (int64_t j = 0; j < p.rows; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < p.bits; ++i) {
      const uint32_t word = p.codes[(g * p.code_stride + j) * (p.bits / 32) + i / 32];
      sum += (word >> i % 32 & 1) != 0 ? u[static_cast<size_t>(i)] : -u[static_cast<size_t>(i)];
    }
    scores.push_back(step * sum);
  }
  return scores;
}

}  // namespace

void RefCodeTopKScores(const CodeTopKParams& p, float* out) {
  const int64_t samples = std::min<int64_t>(kCodeTopKSamples, p.rows);
  std::fill_n(out, p.kv_heads * p.rows, -INFINITY);
  for (int64_t g = 0; g < p.kv_heads; ++g) {
    for (int64_t h = 0; h < p.group; ++h) {
      const std::vector<double> scores = ScoresOfHead(p, g, h);
      double sum = 0;
      for (int64_t i = 0; i < samples; ++i) {
        sum += std::exp(scores[static_cast<size_t>(i * p.rows / samples)]);
      }
      const double base =
          std::log(sum * static_cast<double>(p.rows) / static_cast<double>(samples));
      for (int64_t j = 0; j < p.rows; ++j) {
        float& best = out[g * p.rows + j];
        best = std::max(best, static_cast<float>(scores[static_cast<size_t>(j)] - base));
      }
    }
  }
}

}  // namespace carrel::kernels
