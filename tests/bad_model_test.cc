// Model folders that the program must refuse, and models that are not the one of the context: each
// with a message that names the thing, and everything that was there still there.
#include <cstring>
#include <filesystem>
#include <random>

#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

constexpr int kBad = 2;
constexpr int kFailed = 1;
constexpr char kNorm[] = "model.layers.3.input_layernorm.weight";
constexpr char kEmbedding[] = "model.embed_tokens.weight";

class BadModelTest : public StoreTest {
 protected:
  // Neither prefill nor ask runs with it.
  void ExpectRefused(const ModelCopy& model, int exit_code, const Texts& message) {
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})), FailsWith(exit_code, message));
    EXPECT_THAT(Carrel(Ask(kKept, {"--model", model.folder()})), FailsWith(exit_code, message));
    ExpectNothingLost();
  }
};

TEST_F(BadModelTest, Folder_Missing_IsNamed) {
  EXPECT_THAT(Carrel(Prefill("new", {"--model", path("nowhere")})),
              FailsWith(kFailed, Texts{"NOT_FOUND", path("nowhere")}));
  EXPECT_THAT(Carrel(Ask(kKept, {"--model", path("nowhere")})),
              FailsWith(kFailed, Texts{"NOT_FOUND", path("nowhere")}));
  EXPECT_THAT(Carrel(Prefill("new", {"--model", document_})),
              FailsWith(kBad, Texts{document_, "not a GGUF file"}));
  ExpectNothingLost();
}

TEST_F(BadModelTest, Config_MissingOrMalformed_IsNamed) {
  ModelCopy model(path("model"));
  const std::string config = ReadBytes(model.path("config.json"));
  model.Remove("config.json");
  ExpectRefused(model, kFailed, {"NOT_FOUND", model.path("config.json")});
  WriteBytes(model.path("config.json"), config.substr(0, config.size() / 2));
  ExpectRefused(model, kBad, {model.path("config.json"), "JSON"});
  model.Replace("config.json", "[]");
  ExpectRefused(model, kBad, {model.path("config.json"), "object"});
}

TEST_F(BadModelTest, Weights_Missing_AreNamed) {
  ModelCopy model(path("model"));
  model.Remove("model.safetensors");
  ExpectRefused(model, kFailed, {"NOT_FOUND", model.folder(), "model.safetensors"});
}

TEST_F(BadModelTest, Weights_Truncated_AreNamed) {
  ModelCopy model(path("model"));
  const std::string whole = ReadBytes(model.path("model.safetensors"));
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, whole.data(), sizeof(header_bytes));
  const struct {
    size_t bytes;
    const char* message;
  } cuts[] = {
      {0, "0 bytes"},
      {1, "truncated"},
      {7, "truncated"},
      {8, "truncated"},
      {100, "truncated"},
      {header_bytes + 7, "truncated"},
      {header_bytes + 8, "truncated"},
      {header_bytes + 9, "truncated"},
      {whole.size() / 2, "truncated"},
      {whole.size() - 1, "truncated"},
  };
  model.Replace("model.safetensors", whole);
  for (size_t i = std::size(cuts); i-- > 0;) {
    std::filesystem::resize_file(model.path("model.safetensors"), cuts[i].bytes);
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
                FailsWith(kBad, Texts{model.path("model.safetensors"), cuts[i].message}))
        << cuts[i].bytes << " bytes left";
    // Only lengths shrink: the next cut is shorter.
  }
  ExpectRefused(model, kBad, {model.path("model.safetensors")});
}

TEST_F(BadModelTest, Weights_NotSafetensors_AreNamed) {
  ModelCopy model(path("model"));
  const std::string header = "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}";
  const std::string contents[] = {
      "this is no model at all",
      std::string(64, '\xff'),
      std::string("\x10\0\0\0\0\0\0\0", 8) + "not JSON, really",
      std::string("\x02\0\0\0\0\0\0\0", 8) + "[]",
      std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header + "1234",
  };
  for (const std::string& content : contents) {
    model.Replace("model.safetensors", content);
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
                FailsWith(kBad, Texts{model.path("model.safetensors")}));
  }
  ExpectNothingLost();
}

TEST_F(BadModelTest, Tensor_OtherShape_IsNamedWithBothShapes) {
  ModelCopy model(path("model"));
  model.EditWeights([](TensorFile& weights) {
    weights.header[kEmbedding]["shape"] = {256, 2048};  // as many elements
  });
  ExpectRefused(model, kBad, {kEmbedding, "[256, 2048]", "[2048, 256]"});
}

TEST_F(BadModelTest, Tensor_OtherDtype_IsNamed) {
  ModelCopy model(path("model"));
  model.EditWeights([](TensorFile& weights) {
    weights.header[kNorm]["dtype"] = "I32";  // as many bytes
    weights.header[kNorm]["shape"] = {128};
  });
  ExpectRefused(model, kBad, {kNorm, "i32", "bf16"});
  model.EditWeights([](TensorFile& weights) { weights.header[kNorm]["dtype"] = "F8_E4M3"; });
  ExpectRefused(model, kBad, {kNorm, "F8_E4M3"});
}

TEST_F(BadModelTest, Tensor_ShapeDoesNotFitItsBytes_IsNamed) {
  ModelCopy model(path("model"));
  model.EditWeights([](TensorFile& weights) { weights.header[kNorm]["shape"] = {257}; });
  ExpectRefused(model, kBad, {kNorm, "512", "514"});
  model.EditWeights([](TensorFile& weights) {
    weights.header[kNorm]["shape"] = {uint64_t{1} << 62, 256};  // overflows
  });
  ExpectRefused(model, kBad, {kNorm});
}

TEST_F(BadModelTest, Tensor_MissingOrSurplus_IsNamed) {
  ModelCopy model(path("model"));
  model.EditWeights([](TensorFile& weights) {
    weights.header["model.renamed"] = weights.header[kNorm];
    weights.header.erase(kNorm);
  });
  ExpectRefused(model, kBad, {kNorm, "missing"});
  // More layers in the file than config.json has, and the other way round.
  ModelCopy fewer(path("fewer"));
  fewer.EditJson("config.json", [](auto& config) { config["num_hidden_layers"] = 7; });
  ExpectRefused(fewer, kBad, {"model.layers.7."});
  ModelCopy more(path("more"));
  more.EditJson("config.json", [](auto& config) { config["num_hidden_layers"] = 9; });
  ExpectRefused(more, kBad, {"model.layers.8.", "missing"});
}

TEST_F(BadModelTest, Config_ThatDoesNotFitTheWeights_NamesTheTensor) {
  const struct {
    const char* field;
    int64_t value;
    const char* tensor;
  } cases[] = {
      {"vocab_size", 4096, kEmbedding},
      {"intermediate_size", 705, "gate_proj"},
      {"num_key_value_heads", 4, "k_proj"},
      {"head_dim", 32, "q_proj"},
  };
  for (const auto& c : cases) {
    ModelCopy model(path(c.field));
    model.EditJson("config.json", [&](auto& config) { config[c.field] = c.value; });
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
                FailsWith(kBad, Texts{c.tensor}));
  }
  ExpectNothingLost();
}

TEST_F(BadModelTest, Architecture_Unknown_IsNamed) {
  ModelCopy model(path("model"));
  model.EditJson("config.json", [](auto& config) { config["model_type"] = "gemma3"; });
  ExpectRefused(model, kFailed, {"UNIMPLEMENTED", "model_type", "gemma3", "llama", "qwen3"});
  ModelCopy other(path("other"));
  other.EditJson("config.json", [](auto& config) {
    config["architectures"] = {"LlamaForSequenceClassification"};
  });
  ExpectRefused(other, kFailed, {"architectures", "LlamaForSequenceClassification"});
}

TEST_F(BadModelTest, RopeType_UnknownOrIncomplete_IsNamed) {
  ModelCopy model(path("model"));
  model.EditJson("config.json", [](auto& config) {
    config["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", 4.0}};
  });
  ExpectRefused(model, kFailed, {"UNIMPLEMENTED", "rope_type", "dynamic"});
  model.EditJson("config.json", [](auto& config) {
    config.erase("rope_scaling");
    config["attn_logit_softcapping"] = 50.0;
  });
  ExpectRefused(model, kFailed, {"UNIMPLEMENTED", "attn_logit_softcapping=50.0"});
  model.EditJson("config.json", [](auto& config) { config.erase("attn_logit_softcapping"); });
  model.EditJson("config.json", [](auto& config) {
    config["rope_scaling"] = {{"rope_type", "linear"}};
  });
  ExpectRefused(model, kBad, {"rope_scaling", "factor"});
  model.EditJson("config.json", [](auto& config) {
    config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}, {"mystery", 1}};
  });
  ExpectRefused(model, kFailed, {"mystery"});
}

// As of Gemma 3, whose tokenizer has one more than its embeddings.
TEST_F(BadModelTest, AnAddedTokenBeyondTheVocabulary_IsOrdinaryText) {
  ModelCopy model(path("model"));
  model.EditJson("tokenizer.json", [](auto& tokenizer) {
    auto token = tokenizer["added_tokens"][2];
    token["id"] = 5000;
    token["content"] = "<|surplus|>";
    tokenizer["added_tokens"].push_back(token);
  });
  const std::string document = WriteFile("surplus.txt", "The <|surplus|> pier.");
  EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder(), "--input", document})), Succeeds());
}

TEST_F(BadModelTest, Tokenizer_Malformed_IsNamed) {
  const std::string whole = ReadBytes(DemoModel() + "/tokenizer.json");
  ModelCopy model(path("model"));
  for (const std::string& content :
       {std::string(), std::string("{"), whole.substr(0, whole.size() / 2), std::string("[]"),
        std::string("{\"model\": 1}")}) {
    model.Replace("tokenizer.json", content);
    EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})),
                FailsWith(kBad, Texts{model.path("tokenizer.json")}));
  }
  model.Replace("tokenizer.json", whole);
  model.EditJson("tokenizer.json", [](auto& json) { json["model"]["merges"][5] = "zq qz"; });
  ExpectRefused(model, kBad, {model.path("tokenizer.json"), "zq"});
}

TEST_F(BadModelTest, Tokenizer_OfAnotherKind_IsNamed) {
  ModelCopy model(path("model"));
  model.EditJson("tokenizer.json", [](auto& json) { json["model"]["type"] = "WordPiece"; });
  ExpectRefused(model, kFailed, {"UNIMPLEMENTED", model.path("tokenizer.json"), "WordPiece"});
}

TEST_F(BadModelTest, Tokenizer_Missing_TextIsRefusedAndTokensAreTaken) {
  ModelCopy model(path("model"));
  model.Remove("tokenizer.json");
  const Args text = Prefill("new", {"--model", model.folder()});
  EXPECT_THAT(Carrel(text), FailsWith(kFailed, Texts{"no tokenizer", "token ids"}));
  ExpectNothingLost();
  const std::string tokens = WriteFile("tokens.json", "[0, 100, 200, 300, 400, 500, 600]");
  EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder(), "--tokens", tokens})), Succeeds());
  const Args ask = {"--model", model.folder(), "--max-tokens", "3"};
  EXPECT_THAT(Carrel(Ask("new", With(ask, {"--prompt-tokens", tokens}))), Succeeds());
  EXPECT_THAT(Carrel(Ask("new", ask)), FailsWith(kFailed, Texts{"no tokenizer"}));
}

// Another model than the context's must never see its rows, however little it differs.
TEST_F(BadModelTest, Ask_ByAnotherModel_NamesTheDifferingField) {
  ModelCopy weights(path("weights"));
  weights.Replace("model.safetensors", ReadBytes(DemoModel() + "/model.safetensors"));
  const auto size = std::filesystem::file_size(weights.path("model.safetensors"));
  std::mt19937_64 rng(TestSeed());
  FlipBit(weights.path("model.safetensors"), static_cast<int64_t>(size - 1 - rng() % 1000000),
          static_cast<int>(rng() % 8));
  ModelCopy rope(path("rope"));
  rope.EditJson("config.json", [](auto& config) { config["rope_theta"] = 500001.0; });
  ModelCopy scaled(path("scaled"));
  scaled.EditJson("config.json", [](auto& config) {
    config["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  });
  ModelCopy norm(path("norm"));
  norm.EditJson("config.json", [](auto& config) { config["rms_norm_eps"] = 1.1e-5; });
  ModelCopy tokenizer(path("tokenizer"));
  std::string text = ReadBytes(DemoModel() + "/tokenizer.json");
  for (size_t at = text.find("<|pad|>"); at != std::string::npos; at = text.find("<|pad|>")) {
    text.replace(at, 7, "<|pat|>");
  }
  tokenizer.Replace("tokenizer.json", text);
  tokenizer.EditJson("tokenizer_config.json", [](auto& json) { json["pad_token"] = "<|pat|>"; });

  const std::string address = "unix:" + SocketPath();
  const Server server(store_, address);
  const struct {
    const ModelCopy& model;
    Texts message;
  } cases[] = {
      {weights, {"weights_sha256"}},
      {rope, {"rope_theta", "500000", "500001"}},
      {scaled, {"rope_type", "default", "linear", "rope_factor"}},
      {norm, {"rms_norm_eps"}},
      {tokenizer, {"tokenizer_sha256"}},
  };
  for (const auto& c : cases) {
    const Texts message = With({"FAILED_PRECONDITION", kKept}, c.message);
    for (const Args& where : {Args{}, Args{"--server", address}}) {
      const Outcome outcome = Carrel(Ask(kKept, With({"--model", c.model.folder()}, where)));
      EXPECT_THAT(outcome, FailsWith(kFailed, message));
      EXPECT_EQ(outcome.out, "");
    }
  }
  ExpectNothingLost();
}

}  // namespace
}  // namespace carrel::cli
