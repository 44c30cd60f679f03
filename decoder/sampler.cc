#include "decoder/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/status.h"

namespace carrel::decoder {

absl::Status ValidateSamplingConfig(const SamplingConfig& config) {
  if (!(config.temperature >= 0 && config.temperature <= 100)) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature=", config.temperature, " is outside [0, 100]"));
  }
  if (!(config.top_p > 0 && config.top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("top_p=", config.top_p, " is outside (0, 1]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenId> Sampler::Sample(absl::Span<const float> logits) {
  TokenId best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]))
      return absl::InternalError(absl::StrCat("logit of token ", i, " is not a number"));
    if (logits[i] > logits[best]) best = static_cast<TokenId>(i);
  }
  if (config_.temperature == 0) return best;

  weights_.resize(logits.size());
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    weights_[i] = std::exp((double{logits[i]} - logits[best]) / config_.temperature);
    total += weights_[i];
  }
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](TokenId a, TokenId b) {
    return weights_[a] != weights_[b] ? weights_[a] > weights_[b] : a < b;
  });
  size_t kept = 0;
  double carried = 0;
  while (kept < order_.size() && carried < config_.top_p * total)
    carried += weights_[order_[kept++]];

  // 53 random bits as a share of what was kept: the same on every standard library, unlike
  // std::uniform_real_distribution.
  double left = static_cast<double>(rng_() >> 11) * 0x1p-53 * carried;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weights_[order_[i]];
    if (left < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace carrel::decoder
