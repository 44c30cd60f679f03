// What:   how a model's makers advise to draw its tokens: generation_config.json of a folder,
//         general.sampling.* of a GGUF file.
// Source: GenerationConfig of transformers; llama.cpp's keys of the same meaning.
// Edge:   null is absent, and so are a top_k of -1 or 0 (every token) where that is what is meant: they
//         are values. A file that names a temperature, top_p, top_k or min_p and no do_sample advises
//         to sample.
// Errors: InvalidArgument a value of another type or outside its bound (names file, field, value,
//         bound).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carrel::model {

struct GenerationDefaults {
  std::string source;  // the file that says so; empty: nothing is advised
  std::optional<bool> do_sample;
  std::optional<double> temperature;         // [0, 100]
  std::optional<double> top_p;               // (0, 1]
  std::optional<int64_t> top_k;              // >= 0; 0: all
  std::optional<double> min_p;               // [0, 1]
  std::optional<double> repetition_penalty;  // [0.01, 100]
  // What else the file advises and nobody does here: names, for a message.
  std::vector<std::string> ignored;

  // Whether answers are drawn, and not the likeliest tokens; nothing: the file does not say.
  std::optional<bool> samples() const;
};

// Of a folder, or of a GGUF file. Neither key nor file: nothing is advised.
absl::StatusOr<GenerationDefaults> LoadGenerationDefaults(const std::string& model_dir);

}  // namespace carrel::model
