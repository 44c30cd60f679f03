#include "decoder/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "common/status.h"
#include "common/thread_pool.h"

namespace carrel::decoder {

absl::Status ValidateSamplingConfig(const SamplingConfig& config) {
  if (!(config.temperature >= 0 && config.temperature <= 100)) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature=", config.temperature, " is outside [0, 100]"));
  }
  if (!(config.top_p > 0 && config.top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("top_p=", config.top_p, " is outside (0, 1]"));
  }
  if (config.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling top_k=", config.top_k, " is negative; 0 is every token"));
  }
  if (!(config.min_p >= 0 && config.min_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("min_p=", config.min_p, " is outside [0, 1]"));
  }
  if (!(config.repetition_penalty >= 0.01 && config.repetition_penalty <= 100)) {
    return absl::InvalidArgumentError(
        absl::StrCat("repetition_penalty=", config.repetition_penalty, " is outside [0.01, 100]"));
  }
  return absl::OkStatus();
}

SamplingConfig AdvisedSampling(const model::GenerationDefaults& advice,
                               const SamplingConfig& otherwise) {
  SamplingConfig config = otherwise;
  if (advice.samples() == true) {
    config.temperature = advice.temperature.value_or(1.0);
  } else if (advice.samples() == false) {
    config.temperature = 0;
  }
  config.top_p = advice.top_p.value_or(otherwise.top_p);
  config.top_k = advice.top_k.value_or(otherwise.top_k);
  config.min_p = advice.min_p.value_or(otherwise.min_p);
  config.repetition_penalty = advice.repetition_penalty.value_or(otherwise.repetition_penalty);
  return config;
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

absl::Status NotANumber(absl::Span<const float> logits) {
  const auto bad = std::find_if(logits.begin(), logits.end(), [](float l) { return l != l; });
  return absl::InternalError(
      absl::StrCat("logit of token ", bad - logits.begin(), " is not a number"));
}

}  // namespace

absl::StatusOr<TokenId> GreedyToken(absl::Span<const float> logits, ThreadPool* pool) {
  constexpr size_t kPieceLogits = 16384;
  std::vector<std::optional<TokenId>> found((logits.size() + kPieceLogits - 1) / kPieceLogits);
  const auto look = [&](int64_t i) {
    const size_t piece = static_cast<size_t>(i);
    found[piece] = FirstLargest(logits.subspan(piece * kPieceLogits, kPieceLogits));
  };
  pool->ParallelFor(static_cast<int64_t>(found.size()), look);
  size_t best = 0;
  for (size_t piece = 0; piece < found.size(); ++piece) {
    if (!found[piece].has_value()) return NotANumber(logits);
    const size_t token = piece * kPieceLogits + static_cast<size_t>(*found[piece]);
    if (logits[token] > logits[best]) best = token;
  }
  return static_cast<TokenId>(best);
}

void Sampler::Saw(absl::Span<const TokenId> tokens) {
  if (config_.repetition_penalty == 1) return;
  for (const TokenId token : tokens) {
    const auto at = static_cast<size_t>(token);
    if (at >= is_seen_.size()) is_seen_.resize(at + 1);
    if (!is_seen_[at]) seen_.push_back(token);
    is_seen_[at] = true;
  }
}

absl::Span<const float> Sampler::Penalized(absl::Span<const float> logits) {
  if (seen_.empty()) return logits;
  penalized_.assign(logits.begin(), logits.end());
  const auto penalty = static_cast<float>(config_.repetition_penalty);
  for (const TokenId token : seen_) {
    float& logit = penalized_[static_cast<size_t>(token)];
    logit = logit < 0 ? logit * penalty : logit / penalty;
  }
  return penalized_;
}

absl::StatusOr<TokenId> Sampler::Sample(absl::Span<const float> logits) {
  logits = Penalized(logits);
  const std::optional<TokenId> best = FirstLargest(logits);
  if (!best.has_value()) return NotANumber(logits);
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
  const auto [kept, carried] = Keep(total);
  // 53 random bits as a share of what was kept: the same on every standard library, unlike
  // std::uniform_real_distribution.
  double left = static_cast<double>(rng_() >> 11) * 0x1p-53 * carried;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weights_[Likeliest(i)];
    if (left < 0) return Likeliest(i);
  }
  return Likeliest(kept - 1);
}

// The likeliest token weighs 1.
std::pair<size_t, double> Sampler::Keep(double total) {
  size_t kept = order_.size();
  const auto carried_by = [this](size_t tokens) {
    double carried = 0;
    for (size_t i = 0; i < tokens; ++i) carried += weights_[Likeliest(i)];
    return carried;
  };
  double carried = total;
  if (config_.top_k > 0 && static_cast<size_t>(config_.top_k) < kept) {
    kept = static_cast<size_t>(config_.top_k);
    carried = carried_by(kept);
  }
  if (config_.top_p < 1) {
    const size_t most = kept;
    const double wanted = config_.top_p * carried;
    kept = 0;
    carried = 0;
    while (kept < most && carried < wanted) carried += weights_[Likeliest(kept++)];
  }
  if (config_.min_p > 0) {
    size_t likely = 0;
    while (likely < kept && weights_[Likeliest(likely)] >= config_.min_p) ++likely;
    if (likely < kept) {
      kept = likely;
      carried = carried_by(kept);
    }
  }
  return {kept, carried};
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
