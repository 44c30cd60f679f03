// What:   how an answer's tokens are drawn: as the flags say; what they do not say, as the model's makers advise
//         (model/generation_defaults.h); where they advise nothing, greedily.
// Errors: InvalidArgument a value outside its bound, and a flag that would change nothing (--top-p and --seed of
//         a greedy answer).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "decoder/sampler.h"
#include "model/generation_defaults.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct SamplingFlags {
  std::optional<double> temperature, top_p;
  std::optional<uint64_t> seed;

  void Declare(CLI::App& command);
  absl::Status Check() const;  // of the values alone, before a model is loaded
  absl::StatusOr<decoder::SamplingConfig> Resolve(const model::GenerationDefaults& advice) const;
  // For people, when something that was not said is as the model advises: what, and how to have it otherwise.
  // Empty: nothing is.
  std::string Tell(const model::GenerationDefaults& advice) const;
};

// "temperature 0.7, top_p 0.8, top_k 20"; "greedy".
std::string DescribeSampling(const decoder::SamplingConfig& config);

}  // namespace carrel::tools
