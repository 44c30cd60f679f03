#include "model/test_configs.h"

#include <fstream>
#include <map>

#include "common/json.h"
#include "common/test_util.h"
#include "nlohmann/json.hpp"

namespace carrel::model {

using nlohmann::json;

json BaseConfig(const std::string& model_type) {
  static const std::map<std::string, std::string> kClasses = {
      {"llama", "LlamaForCausalLM"},        {"mistral", "MistralForCausalLM"},
      {"qwen2", "Qwen2ForCausalLM"},        {"qwen3", "Qwen3ForCausalLM"},
      {"qwen3_moe", "Qwen3MoeForCausalLM"}, {"gemma3_text", "Gemma3ForCausalLM"}};
  const auto known = kClasses.find(model_type);
  return {{"model_type", model_type},
          {"architectures", json::array({known == kClasses.end() ? "Other" : known->second})},
          {"vocab_size", 1000},
          {"hidden_size", 512},
          {"intermediate_size", 1024},
          {"num_hidden_layers", 4},
          {"num_attention_heads", 8},
          {"num_key_value_heads", 2},
          {"max_position_embeddings", 4096},
          {"bos_token_id", 3},
          {"eos_token_id", 4}};
}

json PatchedConfig(const std::string& model_type, const json& set) {
  json config = BaseConfig(model_type);
  for (const auto& [name, value] : set.items()) {
    if (name[0] == '-') {
      config.erase(name.substr(1));
    } else {
      config[name] = value;
    }
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadConfig(const json& config, const std::string& generation) {
  const std::string folder = FreshTempDir();
  std::ofstream(folder + "/config.json", std::ios::binary) << DumpJson(config);
  if (!generation.empty()) {
    std::ofstream(folder + "/generation_config.json", std::ios::binary) << generation;
  }
  return LoadModelConfig(folder);
}

}  // namespace carrel::model
