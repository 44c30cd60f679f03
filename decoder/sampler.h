// What:   the next token from logits: greedy, or drawn from the softmax at a temperature. In the order
//         of transformers: what was said before is made less likely (repetition_penalty), the
//         temperature divides, the top_k likeliest stay, of them the smallest set that carries top_p,
//         and of these the ones of at least min_p times the likeliest's probability.
// Source: nucleus sampling, Holtzman et al. 2020, section 3.1; min-p, Nguyen et al. 2024; the penalty,
//         Keskar et al. 2019, section 4.1: a positive logit is divided by it, a negative one
//         multiplied, once however often the token occurred.
// Edge:   greedy ties go to the smaller id. A NaN among the logits is Internal, never a token; one
//         that is infinite is taken.
// Cost:   greedy, a pass over the logits; else an exponential for each, and as many of the likeliest
//         sorted as are looked at: few, where a model knows what it says.
// Threads: one. The same seed and logits give the same tokens on every machine.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/generation_defaults.h"

namespace carrel {
class ThreadPool;
}

namespace carrel::decoder {

struct SamplingConfig {
  double temperature = 0;         // 0: greedy; otherwise (0, 100]
  double top_p = 1;               // (0, 1]
  int64_t top_k = 0;              // 0: all
  double min_p = 0;               // [0, 1]
  double repetition_penalty = 1;  // [0.01, 100]; 1: none
  uint64_t seed = 0;

  // Whether the largest logit, as the model gives it, is the next token.
  bool greedy() const { return temperature == 0 && repetition_penalty == 1; }
};

absl::Status ValidateSamplingConfig(const SamplingConfig& config);

// What a model advises, where it does; `otherwise` elsewhere. A model that advises to sample and names
// no temperature means 1, as transformers does.
SamplingConfig AdvisedSampling(const model::GenerationDefaults& advice,
                               const SamplingConfig& otherwise);

// What a greedy sampler takes, of pieces that the pool's threads look at.
absl::StatusOr<TokenId> GreedyToken(absl::Span<const float> logits, ThreadPool* pool);

class Sampler {
 public:
  explicit Sampler(const SamplingConfig& config) : config_(config), rng_(config.seed) {}
  // Tokens that repetition_penalty counts from now on. Ids are of the vocabulary.
  void Saw(absl::Span<const TokenId> tokens);
  absl::StatusOr<TokenId> Sample(absl::Span<const float> logits);

 private:
  absl::Span<const float> Penalized(absl::Span<const float> logits);
  // How many of the likeliest may be drawn, and the weights that they carry.
  std::pair<size_t, double> Keep(double total);
  // By weight, ties by id. Sorts that far.
  TokenId Likeliest(size_t place);

  const SamplingConfig config_;
  std::mt19937_64 rng_;
  std::vector<TokenId> seen_;  // each once
  std::vector<bool> is_seen_;
  std::vector<float> penalized_;
  std::vector<TokenId> order_;  // the first sorted_ in their order
  size_t sorted_ = 0;
  std::vector<double> weights_;
};

}  // namespace carrel::decoder
