#include "tools/carrel/sampling_flags.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace carrel::tools {

void SamplingFlags::Declare(CLI::App& command) {
  command.add_option("--temperature", temperature,
                     "0: greedy; by default as the model advises, or greedy");
  command.add_option("--top-p", top_p,
                     "draw from the likeliest tokens of this mass; by default as advised");
  command.add_option("--seed", seed, "of the sampler; by default 0: the same answer every time");
}

absl::Status SamplingFlags::Check() const {
  decoder::SamplingConfig config;
  config.temperature = temperature.value_or(0);
  config.top_p = top_p.value_or(1);
  return decoder::ValidateSamplingConfig(config);
}

absl::StatusOr<decoder::SamplingConfig> SamplingFlags::Resolve(
    const model::GenerationDefaults& advice) const {
  decoder::SamplingConfig config;
  if (temperature != 0.0) config = decoder::AdvisedSampling(advice, {});
  config.temperature = temperature.value_or(config.temperature);
  config.top_p = top_p.value_or(config.top_p);
  config.seed = seed.value_or(0);
  RETURN_IF_ERROR(decoder::ValidateSamplingConfig(config));
  if (config.temperature == 0 && (top_p.has_value() || seed.has_value())) {
    return absl::InvalidArgumentError(
        absl::StrCat(top_p.has_value() ? "--top-p" : "--seed",
                     " changes nothing: the answer is greedy; give --temperature as well"));
  }
  return config;
}

std::string SamplingFlags::Tell(const model::GenerationDefaults& advice) const {
  if (advice.source.empty() || temperature == 0.0) return "";
  const absl::StatusOr<decoder::SamplingConfig> config = Resolve(advice);
  if (!config.ok() || (config->greedy() && advice.ignored.empty())) return "";
  return absl::StrCat(
      "sampling as ", advice.source, " advises: ", DescribeSampling(*config),
      advice.ignored.empty()
          ? ""
          : absl::StrCat(" (not done here: ", absl::StrJoin(advice.ignored, ", "), ")"),
      "; --temperature 0 is greedy");
}

std::string DescribeSampling(const decoder::SamplingConfig& config) {
  if (config.greedy()) return "greedy";
  std::string text = absl::StrCat("temperature ", config.temperature);
  if (config.top_p != 1) absl::StrAppend(&text, ", top_p ", config.top_p);
  if (config.top_k != 0) absl::StrAppend(&text, ", top_k ", config.top_k);
  if (config.min_p != 0) absl::StrAppend(&text, ", min_p ", config.min_p);
  if (config.repetition_penalty != 1) {
    absl::StrAppend(&text, ", repetition_penalty ", config.repetition_penalty);
  }
  return text;
}

}  // namespace carrel::tools
