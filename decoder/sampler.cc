#include "decoder/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

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

namespace {

// The first of the largest, or nothing if one is not a number: eight lanes, so that a vocabulary takes microseconds.
std::optional<TokenId> FirstLargest(absl::Span<const float> logits) {
  constexpr size_t kLanes = 8;
  float most[kLanes];
  std::fill_n(most, kLanes, -std::numeric_limits<float>::infinity());
  uint32_t unordered[kLanes] = {};
  const auto take = [&](size_t lane, float logit) {
    most[lane] = logit > most[lane] ? logit : most[lane];
    unordered[lane] |= logit != logit;
  };
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) take(lane, logits[i + lane]);
  }
  for (; i < logits.size(); ++i) take(0, logits[i]);
  if (std::any_of(unordered, unordered + kLanes, [](uint32_t any) { return any != 0; })) return {};
  const float largest = *std::max_element(most, most + kLanes);
  return static_cast<TokenId>(std::find(logits.begin(), logits.end(), largest) - logits.begin());
}

}  // namespace

absl::StatusOr<TokenId> Sampler::Sample(absl::Span<const float> logits) {
  const std::optional<TokenId> best = FirstLargest(logits);
  if (!best.has_value()) {
    const auto bad = std::find_if(logits.begin(), logits.end(), [](float l) { return l != l; });
    return absl::InternalError(
        absl::StrCat("logit of token ", bad - logits.begin(), " is not a number"));
  }
  if (config_.temperature == 0 || std::isinf(logits[*best])) return *best;

  weights_.resize(logits.size());
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    weights_[i] = std::exp((double{logits[i]} - logits[*best]) / config_.temperature);
    total += weights_[i];
  }
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  sorted_ = 0;
  size_t kept = order_.size();
  double carried = total;
  if (config_.top_p < 1) {
    kept = 0;
    carried = 0;
    while (kept < order_.size() && carried < config_.top_p * total) {
      carried += weights_[Likeliest(kept++)];
    }
  }
  // 53 random bits as a share of what was kept: the same on every standard library, unlike
  // std::uniform_real_distribution.
  double left = static_cast<double>(rng_() >> 11) * 0x1p-53 * carried;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weights_[Likeliest(i)];
    if (left < 0) return Likeliest(i);
  }
  return Likeliest(kept - 1);
}

TokenId Sampler::Likeliest(size_t place) {
  if (place >= sorted_) {
    const size_t end = std::min(order_.size(), std::max<size_t>(64, 8 * sorted_));
    std::partial_sort(order_.begin() + sorted_, order_.begin() + end, order_.end(),
                      [&](TokenId a, TokenId b) {
                        return weights_[a] != weights_[b] ? weights_[a] > weights_[b] : a < b;
                      });
    sorted_ = end;
  }
  return order_[place];
}

}  // namespace carrel::decoder
