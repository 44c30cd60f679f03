// What:    config.json files of small models, for tests.
// Shapes:  4 layers, 8 q heads, 2 KV heads, hidden size 512.
// Threads: any.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/config.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::model {

// Every field that a model of this type must have.
nlohmann::json BaseConfig(const std::string& model_type);

// `set` replaces fields (also by null); "-name" removes one.
nlohmann::json PatchedConfig(const std::string& model_type, const nlohmann::json& set);

// What a folder with these files is read as. generation: of generation_config.json; empty: none.
absl::StatusOr<ModelConfig> LoadConfig(const nlohmann::json& config,
                                       const std::string& generation = "");

}  // namespace carrel::model
