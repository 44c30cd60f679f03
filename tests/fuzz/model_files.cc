// config.json and generation_config.json, safetensors, tokenizer.json, tokenizer_config.json, GGUF,
// adapter_config.json: what comes with a model that somebody downloaded.
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/test_folders.h"
#include "model/adapter.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf.h"
#include "model/gguf_config.h"
#include "model/gguf_test_model.h"
#include "model/safetensors.h"
#include "model/tokenizer/gguf_tokenizer.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

using nlohmann::json;

constexpr char kLlama[] =
    R"({"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
 "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
 "rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, "eos_token_id": [1, 2], "bos_token_id": 0})";
constexpr char kMoe[] =
    R"({"model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
 "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
 "decoder_sparse_step": 1, "mlp_only_layers": [0], "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
 "original_max_position_embeddings": 128}, "tie_word_embeddings": false})";

void RunConfig(absl::string_view bytes) {
  const auto [config, generation] = SplitAtNul(bytes);
  const std::string folder =
      std::filesystem::path(WriteInput("config/config.json", config)).parent_path();
  const std::string other = folder + "/generation_config.json";
  if (generation.empty()) {
    std::filesystem::remove(other);
  } else {
    WriteInput("config/generation_config.json", generation);
  }
  const auto loaded = model::LoadModelConfig(folder);
  if (!loaded.ok()) return;
  (void)loaded->FingerprintFields();
  if (loaded->shape.head_dim <= 4096)
    (void)model::RopeInvFreq(loaded->rope, loaded->shape.head_dim);
}

std::vector<std::string> ConfigSeeds() {
  return {kLlama, kMoe,
          std::string(kLlama) + '\0' + R"({"eos_token_id": 2, "bos_token_id": null})"};
}

CARREL_FUZZ_TARGET(config, RunConfig, ConfigSeeds);

void RunSafetensors(absl::string_view bytes) {
  const auto file = model::Safetensors::OpenFile(WriteInput("model.safetensors", bytes));
  if (!file.ok()) return;
  size_t sum = 0, total = 0;
  for (const auto& [name, view] : file->tensors()) {
    CARREL_FUZZ_CHECK(view.elements() >= 0);
    for (const char c : view.bytes) sum += static_cast<unsigned char>(c);
    total += view.bytes.size();
  }
  CARREL_FUZZ_CHECK(total <= bytes.size() && sum <= total * 255);
}

std::vector<std::string> SafetensorsSeeds() {
  const std::string path = WriteInput("seed.safetensors", "");
  const std::string data(24, 'x');
  const model::TensorView a{DType::kF32, {2, 3}, data};
  const model::TensorView b{DType::kBf16, {1, 4}, absl::string_view(data).substr(0, 8)};
  const model::NamedTensor tensors[] = {{"model.norm.weight", a}, {"lm_head.weight", b}};
  CARREL_FUZZ_CHECK(model::WriteSafetensors(path, tensors).ok());
  const auto bytes = ReadFile(path);
  CARREL_FUZZ_CHECK(bytes.ok());
  return {*bytes};
}

CARREL_FUZZ_TARGET(safetensors, RunSafetensors, SafetensorsSeeds);

void RunTokenizer(absl::string_view bytes) {
  const auto [tokenizer, config] = SplitAtNul(bytes);
  const std::string folder =
      std::filesystem::path(WriteInput("tokenizer/tokenizer.json", tokenizer)).parent_path();
  const std::string other = folder + "/tokenizer_config.json";
  if (config.empty()) {
    std::filesystem::remove(other);
  } else {
    WriteInput("tokenizer/tokenizer_config.json", config);
  }
  const auto loaded = model::LoadTokenizer(folder);
  if (!loaded.ok()) return;
  model::Tokenizer::Dropped dropped;
  const auto ids = (*loaded)->Encode("abc  1234 \xc3\xa9t\xc3\xa9, don't\n<e> x", &dropped);
  if (!ids.ok()) return;
  for (const TokenId id : *ids) CARREL_FUZZ_CHECK(id >= 0 && id < (*loaded)->vocab_size());
  (void)(*loaded)->Decode(*ids, true);
}

// A byte-level BPE of few tokens, with every part that is read.
std::string SmallTokenizer() {
  json vocab;
  const std::vector<std::string> pieces = {"a",   "b", "c", "\u0120",  "ab",
                                           "abc", "1", "t", "\u0120a", "d"};
  for (size_t i = 0; i < pieces.size(); ++i) vocab[pieces[i]] = i;
  const auto split = json{{"type", "Split"},
                          {"pattern", {{"Regex", R"('s|'t| ?\p{L}+| ?\p{N}{1,3}|\s+(?!\S)|\s+)"}}},
                          {"behavior", "Isolated"},
                          {"invert", false}};
  const auto bytes = json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const json tokenizer = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens",
       {{{"id", 10},
         {"content", "<e>"},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false},
         {"special", true}}}},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<e>"}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", json::array()},
        {"special_tokens", {{"<e>", {{"id", "<e>"}, {"ids", {10}}, {"tokens", {"<e>"}}}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"ignore_merges", false},
        {"vocab", vocab},
        {"merges", {"a b", "ab c", "\u0120 a"}}}}};
  return tokenizer.dump();
}

std::vector<std::string> TokenizerSeeds() {
  const json config = {{"add_bos_token", true},
                       {"bos_token", {{"content", "<e>"}}},
                       {"added_tokens_decoder",
                        {{"11",
                          {{"content", "<f>"},
                           {"special", true},
                           {"normalized", false},
                           {"lstrip", false},
                           {"rstrip", false},
                           {"single_word", false}}}}}};
  return {SmallTokenizer(), SmallTokenizer() + '\0' + config.dump()};
}

CARREL_FUZZ_TARGET(tokenizer, RunTokenizer, TokenizerSeeds);

void RunGguf(absl::string_view bytes) {
  const auto file = model::Gguf::Open(WriteInput("model.gguf", bytes));
  if (!file.ok()) return;
  size_t sum = 0;
  for (const auto& [name, tensor] : (*file)->tensors()) {
    CARREL_FUZZ_CHECK(tensor.elements() >= 0);
    if (!tensor.bytes.empty()) sum += static_cast<unsigned char>(tensor.bytes.back());
  }
  CARREL_FUZZ_CHECK(sum <= (*file)->tensors().size() * 255);
  (void)model::GgufModelConfig(**file);
  const auto tokenizer = model::GgufTokenizer(**file);
  if (tokenizer.ok()) (void)(*tokenizer)->Encode("abc 12");
}

// The tensors of the test model would be 100 KB: what counts is the header.
std::vector<std::string> GgufSeeds() {
  std::vector<std::string> seeds;
  for (const char* architecture : {"llama", "qwen2"}) {
    model::GgufWriter writer = model::MakeGguf({.architecture = architecture});
    model::GgufWriter rest;
    writer.MoveTensors(-1, rest);
    writer.Tensor("token_embd.weight", kernels::GgufType::kF32, {2, 4}, std::string(32, 'x'));
    model::PutBpeTokenizer(json::parse(SmallTokenizer()), "llama-bpe", writer);
    seeds.push_back(writer.Bytes());
  }
  return seeds;
}

CARREL_FUZZ_TARGET(gguf, RunGguf, GgufSeeds);

std::string AdapterFolder() { return SourceFolder() + "/model/testdata/adapters/all"; }

void RunAdapter(absl::string_view bytes) {
  static const auto* base = new absl::StatusOr<model::ModelConfig>(
      model::LoadModelConfig(SourceFolder() + "/model/testdata/adapters/base"));
  CARREL_FUZZ_CHECK(base->ok());
  const auto [adapter, config] = SplitAtNul(bytes);
  const std::string folder =
      std::filesystem::path(WriteInput("adapter/adapter_config.json", adapter)).parent_path();
  const std::string weights = folder + "/adapter_model.safetensors";
  if (!std::filesystem::exists(weights)) {
    std::filesystem::copy_file(AdapterFolder() + "/adapter_model.safetensors", weights);
  }
  const std::string other = folder + "/config.json";
  if (config.empty()) {
    std::filesystem::remove(other);
  } else {
    WriteInput("adapter/config.json", config);
  }
  model::ModelConfig changed = **base;
  if (!model::ReadAdapterConfig(folder, changed).ok()) return;
  (void)model::Adapter::Load(folder, **base);
}

std::vector<std::string> AdapterSeeds() {
  const auto adapter = ReadFile(AdapterFolder() + "/adapter_config.json");
  const auto config = ReadFile(SourceFolder() + "/model/testdata/adapters/base/config.json");
  CARREL_FUZZ_CHECK(adapter.ok() && config.ok());
  return {*adapter, *adapter + '\0' + *config};
}

CARREL_FUZZ_TARGET(adapter, RunAdapter, AdapterSeeds);

}  // namespace
}  // namespace carrel::fuzz
