#include "tests/demo_gguf.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/bf16.h"
#include "common/test_folders.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tensor_file.h"

namespace carrel {
namespace {

using kernels::GgufType;
using model::GgufWriter;

constexpr int64_t kHeadDim = 64;

std::string Folder() { return SourceFolder() + "/models/demo"; }

std::string GgufName(const std::string& name) {
  return absl::StrReplaceAll(name, {{"model.layers.", "blk."},
                                    {"model.embed_tokens", "token_embd"},
                                    {"model.norm", "output_norm"},
                                    {"input_layernorm", "attn_norm"},
                                    {"post_attention_layernorm", "ffn_norm"},
                                    {"self_attn.q_proj", "attn_q"},
                                    {"self_attn.k_proj", "attn_k"},
                                    {"self_attn.v_proj", "attn_v"},
                                    {"self_attn.o_proj", "attn_output"},
                                    {"mlp.gate_proj", "ffn_gate"},
                                    {"mlp.up_proj", "ffn_up"},
                                    {"mlp.down_proj", "ffn_down"}});
}

std::vector<float> Widen(absl::string_view bf16) {
  std::vector<float> values(bf16.size() / 2);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bf16.data() + 2 * i, 2);
    values[i] = Bf16ToFloat(bits);
  }
  return values;
}

// Rows of `bytes` as a llama's Q and K lie in a GGUF file: the halves of each head alternate.
std::string Alternate(absl::string_view bytes, int64_t rows) {
  const size_t row_bytes = bytes.size() / static_cast<size_t>(rows);
  std::string result;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t in_head = row % kHeadDim;
    const int64_t from = row - in_head + in_head / 2 + in_head % 2 * (kHeadDim / 2);
    absl::StrAppend(&result, bytes.substr(static_cast<size_t>(from) * row_bytes, row_bytes));
  }
  return result;
}

// Blocks of 32 with the largest as 127 steps; the step is one that 16 bits of float can hold.
std::string Q8_0(const std::vector<float>& values) {
  std::string blocks;
  for (size_t at = 0; at < values.size(); at += 32) {
    float largest = 0;
    for (size_t i = at; i < at + 32; ++i) largest = std::max(largest, std::abs(values[i]));
    int exponent = 0;
    (void)std::frexp(largest / 127, &exponent);  // a power of two at or above
    const uint16_t half = static_cast<uint16_t>(std::max(1, exponent + 15) << 10);
    const float step = std::ldexp(1.0f, std::max(1, exponent + 15) - 15);
    blocks.append(reinterpret_cast<const char*>(&half), 2);
    for (size_t i = at; i < at + 32; ++i) {
      blocks.push_back(static_cast<char>(std::lround(values[i] / step)));
    }
  }
  return blocks;
}

}  // namespace

GgufWriter DemoMetadata() {
  GgufWriter writer;
  writer.String("general.architecture", "llama").U32("llama.block_count", 8);
  writer.U32("llama.context_length", 131072).U32("llama.embedding_length", 256);
  writer.U32("llama.feed_forward_length", 704).U32("llama.attention.head_count", 8);
  writer.U32("llama.attention.head_count_kv", 2).U32("llama.attention.key_length", kHeadDim);
  writer.F32("llama.rope.freq_base", 500000).U32("llama.vocab_size", 2048);
  writer.F32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  writer.U32("tokenizer.ggml.bos_token_id", 0).U32("tokenizer.ggml.eos_token_id", 1);
  writer.Bool("tokenizer.ggml.add_bos_token", true);
  const auto tokenizer = nlohmann::json::parse(ReadBytes(Folder() + "/tokenizer.json"));
  return model::PutBpeTokenizer(tokenizer, "qwen2", writer);
}

GgufWriter DemoGguf(GgufType matrices) {
  GgufWriter writer = DemoMetadata();
  const TensorFile file = TensorFile::Read(Folder() + "/model.safetensors");
  for (const auto& [name, entry] : file.header.items()) {
    if (name == "__metadata__") continue;
    EXPECT_EQ(entry["dtype"], "BF16");
    const auto shape = entry["shape"].get<std::vector<int64_t>>();
    std::string bytes(file.Tensor(name));
    if (absl::StrContains(name, "q_proj") || absl::StrContains(name, "k_proj")) {
      bytes = Alternate(bytes, shape[0]);
    }
    if (shape.size() == 1) {
      const std::vector<float> values = Widen(bytes);
      writer.Tensor(GgufName(name), GgufType::kF32, shape,
                    {reinterpret_cast<const char*>(values.data()), values.size() * 4});
    } else {
      writer.Tensor(GgufName(name), matrices, shape,
                    matrices == GgufType::kBf16 ? bytes : Q8_0(Widen(bytes)));
    }
  }
  return writer;
}

}  // namespace carrel
