// What:   the next token from logits: greedy, or drawn from the softmax at a temperature within the
//         smallest set of tokens that carries top_p.
// Source: nucleus sampling, Holtzman et al. 2020, section 3.1.
// Edge:   greedy ties go to the smaller id. A NaN among the logits is Internal, never a token; one
//         that is infinite is taken.
// Cost:   greedy, a pass over the logits; else an exponential for each, and as many of the likeliest
//         sorted as are looked at: few, where a model knows what it says.
// Threads: one. The same seed and logits give the same tokens on every machine.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::decoder {

struct SamplingConfig {
  double temperature = 0;  // 0: greedy; otherwise (0, 100]
  double top_p = 1;        // (0, 1]
  uint64_t seed = 0;
};

absl::Status ValidateSamplingConfig(const SamplingConfig& config);

class Sampler {
 public:
  explicit Sampler(const SamplingConfig& config) : config_(config), rng_(config.seed) {}
  absl::StatusOr<TokenId> Sample(absl::Span<const float> logits);

 private:
  // By weight, ties by id. Sorts that far.
  TokenId Likeliest(size_t place);

  const SamplingConfig config_;
  std::mt19937_64 rng_;
  std::vector<TokenId> order_;  // the first sorted_ in their order
  size_t sorted_ = 0;
  std::vector<double> weights_;
};

}  // namespace carrel::decoder
