#include "model/gguf_test_model.h"

#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "common/file.h"
#include "common/status.h"
#include "model/safetensors.h"

namespace carrel::model {
namespace {

using kernels::GgufType;

constexpr int64_t kLayers = 2, kHidden = 256, kInner = 512, kQHeads = 4, kKvHeads = 2, kDim = 32;

struct Tensor {
  std::string gguf, hugging_face;
  GgufType type;
  std::vector<int64_t> shape;
  std::string bytes;          // of the GGUF file
  std::vector<float> values;  // in the order of the file
  bool alternates = false;    // rows of Q or K of a llama
};

// Random blocks whose values are about 0.05 in size.
std::string RandomBlocks(GgufType type, int64_t elements, std::mt19937_64& rng) {
  const kernels::GgufTypeTraits& traits = kernels::TraitsOf(type);
  std::string bytes(static_cast<size_t>(kernels::GgufBytes(type, elements)), '\0');
  for (char& c : bytes) c = static_cast<char>(rng());
  // Scales by type: where a block has halves, and how large.
  const std::map<GgufType, std::pair<std::vector<int>, float>> halves = {
      {GgufType::kQ4_0, {{0}, 0.01f}},       {GgufType::kQ4_1, {{0, 2}, 0.005f}},
      {GgufType::kQ5_0, {{0}, 0.005f}},      {GgufType::kQ5_1, {{0, 2}, 0.003f}},
      {GgufType::kQ8_0, {{0}, 0.0006f}},     {GgufType::kQ2_K, {{80, 82}, 0.002f}},
      {GgufType::kQ3_K, {{108}, 0.0008f}},   {GgufType::kQ4_K, {{0, 2}, 0.0001f}},
      {GgufType::kQ5_K, {{0, 2}, 0.00006f}}, {GgufType::kQ6_K, {{208}, 0.00004f}},
      {GgufType::kIQ4_NL, {{0}, 0.0008f}},   {GgufType::kIQ4_XS, {{0}, 0.00005f}},
  };
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(traits.block_bytes)) {
    if (type == GgufType::kMxfp4) bytes[at] = static_cast<char>(121);  // 2^-7 of the doubled steps
    const auto found = halves.find(type);
    if (found == halves.end()) continue;
    for (const int offset : found->second.first) {
      // A positive half near the size: its bits from a float that both can hold.
      const float size = found->second.second * (0.5f + static_cast<float>(rng() % 16) / 16);
      uint32_t wide;
      std::memcpy(&wide, &size, sizeof(wide));
      // Denormal halves lose digits, which is fine: whatever stands there is what it means.
      const int exponent = static_cast<int>(wide >> 23) - 127 + 15;
      const uint32_t mantissa = (wide >> 13 & 0x3ff) | 0x400;
      const uint16_t half = exponent > 0
                                ? static_cast<uint16_t>(exponent << 10 | (mantissa & 0x3ff))
                                : static_cast<uint16_t>(mantissa >> (1 - exponent));
      std::memcpy(&bytes[at + static_cast<size_t>(offset)], &half, sizeof(half));
    }
  }
  return bytes;
}

class Maker {
 public:
  explicit Maker(const GgufTestModel& model) : model_(model), rng_(model.seed) {}

  std::vector<Tensor> Run() {
    Matrix("token_embd", "model.embed_tokens", kGgufTestVocab, kHidden);
    for (int64_t i = 0; i < kLayers; ++i) Layer(i);
    Norm("output_norm", "model.norm", kHidden);
    if (!model_.tied) Matrix("output", "lm_head", kGgufTestVocab, kHidden);
    return std::move(tensors_);
  }

 private:
  bool llama() const { return model_.architecture == "llama"; }

  void Layer(int64_t i) {
    const std::string g = absl::StrCat("blk.", i, ".");
    const std::string h = absl::StrCat("model.layers.", i, ".");
    const bool qkv = model_.biases || model_.architecture == "qwen2";
    Norm(g + "attn_norm", h + "input_layernorm", kHidden);
    Projection(g + "attn_q", h + "self_attn.q_proj", kQHeads * kDim, kHidden, qkv, llama());
    Projection(g + "attn_k", h + "self_attn.k_proj", kKvHeads * kDim, kHidden, qkv, llama());
    Projection(g + "attn_v", h + "self_attn.v_proj", kKvHeads * kDim, kHidden, qkv, false);
    Projection(g + "attn_output", h + "self_attn.o_proj", kHidden, kQHeads * kDim, model_.biases,
               false);
    if (model_.architecture == "qwen3") {
      Norm(g + "attn_q_norm", h + "self_attn.q_norm", kDim);
      Norm(g + "attn_k_norm", h + "self_attn.k_norm", kDim);
    }
    Norm(g + "ffn_norm", h + "post_attention_layernorm", kHidden);
    Projection(g + "ffn_gate", h + "mlp.gate_proj", kInner, kHidden, model_.biases, false);
    Projection(g + "ffn_up", h + "mlp.up_proj", kInner, kHidden, model_.biases, false);
    Projection(g + "ffn_down", h + "mlp.down_proj", kHidden, kInner, model_.biases, false);
  }

  void Projection(const std::string& gguf, const std::string& hugging_face, int64_t out, int64_t in,
                  bool bias, bool alternates) {
    Matrix(gguf, hugging_face, out, in);
    tensors_.back().alternates = alternates;
    if (!bias) return;
    Floats(gguf + ".bias", hugging_face + ".bias", {out}, 0.1f);
    tensors_.back().alternates = alternates;
  }

  void Norm(const std::string& gguf, const std::string& hugging_face, int64_t size) {
    Floats(gguf + ".weight", hugging_face + ".weight", {size}, 1.0f);
  }

  // Floats about `mean` that bf16 can hold.
  void Floats(const std::string& gguf, const std::string& hugging_face, std::vector<int64_t> shape,
              float mean) {
    Tensor tensor{gguf, hugging_face, GgufType::kF32, std::move(shape), "", {}, false};
    int64_t count = 1;
    for (const int64_t extent : tensor.shape) count *= extent;
    std::normal_distribution<float> normal(mean, 0.05f);
    for (int64_t i = 0; i < count; ++i) {
      tensor.values.push_back(Bf16ToFloat(FloatToBf16(normal(rng_))));
    }
    tensor.bytes.assign(reinterpret_cast<const char*>(tensor.values.data()), count * sizeof(float));
    tensors_.push_back(std::move(tensor));
  }

  void Matrix(const std::string& gguf, const std::string& hugging_face, int64_t out, int64_t in) {
    GgufType type = GgufType::kF32;
    for (const auto& [part, wanted] : model_.types) {
      if (absl::StrContains(gguf, part)) type = wanted;
    }
    if (in % kernels::TraitsOf(type).block_elements != 0) type = GgufType::kQ8_0;
    if (!kernels::TraitsOf(type).quantized) {
      Floats(gguf + ".weight", hugging_face + ".weight", {out, in}, 0.0f);
      Tensor& tensor = tensors_.back();
      tensor.type = type;
      if (type == GgufType::kF32) return;
      // BF16 holds the values; F16 what its bits say.
      tensor.bytes.clear();
      for (float& value : tensor.values) {
        const uint16_t bits = FloatToBf16(value);
        tensor.bytes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
      }
      kernels::Dequantize(type, tensor.bytes.data(), out * in, tensor.values.data());
      return;
    }
    Tensor tensor{gguf + ".weight", hugging_face + ".weight", type, {out, in}, "", {}, false};
    tensor.bytes = RandomBlocks(type, out * in, rng_);
    tensor.values.resize(static_cast<size_t>(out * in));
    kernels::Dequantize(type, tensor.bytes.data(), out * in, tensor.values.data());
    tensors_.push_back(std::move(tensor));
  }

  const GgufTestModel& model_;
  std::mt19937_64 rng_;
  std::vector<Tensor> tensors_;
};

// Rows in the checkpoint's order: first the even rows of each head, then the odd ones.
std::vector<float> InOrder(const Tensor& tensor) {
  if (!tensor.alternates) return tensor.values;
  const size_t rows = static_cast<size_t>(tensor.shape[0]), width = tensor.values.size() / rows;
  std::vector<float> ordered;
  for (size_t head = 0; head < rows; head += kDim) {
    for (const size_t parity : {0u, 1u}) {
      for (size_t row = head + parity; row < head + kDim; row += 2) {
        ordered.insert(ordered.end(), tensor.values.begin() + row * width,
                       tensor.values.begin() + (row + 1) * width);
      }
    }
  }
  return ordered;
}

std::string ConfigJson(const GgufTestModel& model) {
  const std::map<std::string, std::string> classes = {
      {"llama", "LlamaForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}};
  std::string extra;
  if (model.biases && model.architecture != "qwen2") extra = R"(, "attention_bias": true)";
  if (model.biases && model.architecture == "llama") extra += R"(, "mlp_bias": true)";
  return absl::StrCat(
      R"({"model_type": ")", model.architecture, R"(", "architectures": [")",
      classes.at(model.architecture), R"("], "vocab_size": )", kGgufTestVocab,
      R"(, "hidden_size": )", kHidden, R"(, "intermediate_size": )", kInner,
      R"(, "num_hidden_layers": )", kLayers, R"(, "num_attention_heads": )", kQHeads,
      R"(, "num_key_value_heads": )", kKvHeads, R"(, "head_dim": )", kDim,
      R"(, "max_position_embeddings": 512, "rms_norm_eps": 1e-05, "rope_theta": 5000.0, )",
      R"("hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": )",
      model.tied ? "true" : "false", extra, "}");
}

}  // namespace

GgufWriter MakeGguf(const GgufTestModel& model) {
  const std::string& a = model.architecture;
  GgufWriter writer;
  writer.String("general.architecture", a).U32(a + ".block_count", kLayers);
  writer.U32(a + ".context_length", 512).U32(a + ".embedding_length", kHidden);
  writer.U32(a + ".feed_forward_length", kInner).U32(a + ".attention.head_count", kQHeads);
  writer.U32(a + ".attention.head_count_kv", kKvHeads).U32(a + ".attention.key_length", kDim);
  writer.U32(a + ".attention.value_length", kDim).F32(a + ".rope.freq_base", 5000.0f);
  writer.F32(a + ".attention.layer_norm_rms_epsilon", 1e-5f);
  writer.U32("tokenizer.ggml.bos_token_id", 1).U32("tokenizer.ggml.eos_token_id", 2);
  for (Tensor& tensor : Maker(model).Run()) {
    writer.Tensor(tensor.gguf, tensor.type, tensor.shape, tensor.bytes);
  }
  return writer;
}

absl::Status WriteSameModel(const GgufTestModel& model, DType dtype, const std::string& folder) {
  RETURN_IF_ERROR(WriteFileAtomically(folder + "/config.json", ConfigJson(model)));
  const std::vector<Tensor> made = Maker(model).Run();
  std::vector<std::string> storage;
  std::vector<NamedTensor> tensors;
  std::map<std::string, DType> dtypes;  // of matrices, for their biases
  storage.reserve(made.size());
  for (const Tensor& tensor : made) {
    const std::vector<float> values = InOrder(tensor);
    const bool quantized = kernels::TraitsOf(tensor.type).quantized;
    DType as = quantized ? dtype : tensor.type == GgufType::kBf16 ? DType::kBf16 : DType::kF32;
    const std::string stem = tensor.hugging_face.substr(0, tensor.hugging_face.rfind('.'));
    if (absl::EndsWith(tensor.hugging_face, ".bias")) {
      as = dtypes.at(stem);
    } else {
      dtypes[stem] = as;
    }
    std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    if (as == DType::kBf16) {
      bytes.resize(values.size() * sizeof(uint16_t));
      FloatToBf16(values, reinterpret_cast<uint16_t*>(bytes.data()));
    }
    storage.push_back(std::move(bytes));
    tensors.push_back({tensor.hugging_face, {as, tensor.shape, storage.back()}});
  }
  return WriteSafetensors(folder + "/model.safetensors", tensors);
}

}  // namespace carrel::model
