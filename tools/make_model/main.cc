// What:  writes a random Llama checkpoint of any shape, to measure with: deterministic, as fast as
//        the disk. Its text is noise; its arithmetic takes the time of a real model's.
// Usage: make-model --out DIR [--layers N ...] [--tokenizer DIR]
// Cost:  two bytes per weight on disk, written through a mapping by all cores.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "common/usable_cores.h"

namespace carrel {
namespace {

namespace fs = std::filesystem;

struct Shape {
  int64_t layers = 32;
  int64_t hidden = 4096;
  int64_t ffn = 14336;
  int64_t heads = 32;
  int64_t kv_heads = 8;
  int64_t head_dim = 128;
  int64_t vocab = 128256;
  int64_t max_positions = 131072;
  double rope_theta = 500000;
  bool tied = false;
};

struct Flags {
  std::string out;
  std::string tokenizer;
  Shape shape;  // of Llama-3.1-8B unless a flag says otherwise
  double alike = 0;
  double added = 1;
  uint64_t seed = 1;
};

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  bool ones = false;  // weights of a norm
  bool adds = false;  // to the hidden state
  int64_t begin = 0;  // bytes from the start of the data
  int64_t elements() const {
    int64_t product = 1;
    for (int64_t n : shape) product *= n;
    return product;
  }
};

std::vector<Tensor> Tensors(const Shape& s) {
  const int64_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  std::vector<Tensor> tensors = {{"model.embed_tokens.weight", {s.vocab, s.hidden}}};
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    tensors.push_back({prefix + "input_layernorm.weight", {s.hidden}, true});
    tensors.push_back({prefix + "self_attn.q_proj.weight", {q, s.hidden}});
    tensors.push_back({prefix + "self_attn.k_proj.weight", {kv, s.hidden}});
    tensors.push_back({prefix + "self_attn.v_proj.weight", {kv, s.hidden}});
    tensors.push_back({prefix + "self_attn.o_proj.weight", {s.hidden, q}, false, true});
    tensors.push_back({prefix + "post_attention_layernorm.weight", {s.hidden}, true});
    tensors.push_back({prefix + "mlp.gate_proj.weight", {s.ffn, s.hidden}});
    tensors.push_back({prefix + "mlp.up_proj.weight", {s.ffn, s.hidden}});
    tensors.push_back({prefix + "mlp.down_proj.weight", {s.hidden, s.ffn}, false, true});
  }
  tensors.push_back({"model.norm.weight", {s.hidden}, true});
  if (!s.tied) tensors.push_back({"lm_head.weight", {s.vocab, s.hidden}});
  int64_t at = 0;
  for (Tensor& tensor : tensors) {
    tensor.begin = at;
    at += 2 * tensor.elements();
  }
  return tensors;
}

nlohmann::json Config(const Shape& s) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"tie_word_embeddings", s.tied},
          {"max_position_embeddings", s.max_positions},
          {"torch_dtype", "bfloat16"},
          {"vocab_size", s.vocab},
          {"hidden_size", s.hidden},
          {"intermediate_size", s.ffn},
          {"num_hidden_layers", s.layers},
          {"num_attention_heads", s.heads},
          {"num_key_value_heads", s.kv_heads},
          {"head_dim", s.head_dim},
          {"rope_theta", s.rope_theta},
          {"rope_scaling", nullptr},
          {"rms_norm_eps", 1e-5}};
}

// The SplitMix64 generator (Steele et al. 2014), as a function of the index.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr int64_t kBlockElements = int64_t{1} << 20;

// Uniform with the standard deviation that checkpoints begin training with, times scale.
void Fill(uint16_t* to, int64_t elements, uint64_t seed, float scale) {
  constexpr float kUnit = 0.02f * 1.7320508f / 32768.0f;
  const float step = kUnit * scale;
  for (int64_t i = 0; i < elements; i += 4) {
    const uint64_t bits = Mix(seed + static_cast<uint64_t>(i));
    for (int64_t j = 0; j < 4 && i + j < elements; ++j) {
      to[i + j] = FloatToBf16(step * static_cast<float>(static_cast<int16_t>(bits >> (16 * j))));
    }
  }
}

// Of two tokens' embeddings the cosine, in expectation.
void MakeAlike(uint16_t* embeddings, const Shape& shape, double alike, ThreadPool* pool) {
  const auto own = static_cast<float>(std::sqrt(1 - alike));
  const auto shared = static_cast<float>(std::sqrt(alike));
  pool->ParallelFor(shape.vocab - 1, [&](int64_t token) {
    uint16_t* const row = embeddings + (token + 1) * shape.hidden;
    for (int64_t i = 0; i < shape.hidden; ++i) {
      row[i] = FloatToBf16(shared * Bf16ToFloat(embeddings[i]) + own * Bf16ToFloat(row[i]));
    }
  });
}

absl::Status WriteWeights(const std::string& path, const std::vector<Tensor>& tensors,
                          const Flags& flags, ThreadPool* pool) {
  nlohmann::json header = nlohmann::json::object();
  for (const Tensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", "BF16"},
                           {"shape", tensor.shape},
                           {"data_offsets", {tensor.begin, tensor.begin + 2 * tensor.elements()}}};
  }
  std::string text = DumpJson(header);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const int64_t data = 8 + static_cast<int64_t>(text.size());
  const int64_t bytes = data + tensors.back().begin + 2 * tensors.back().elements();
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus(errno, path);
  if (const int error = posix_fallocate(fd, 0, bytes); error != 0) {
    close(fd);
    return ErrnoStatus(error, absl::StrCat(path, ": room for ", bytes, " bytes"));
  }
  void* const map =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int map_error = errno;
  close(fd);
  if (map == MAP_FAILED) return ErrnoStatus(map_error, path);
  char* const file = static_cast<char*>(map);
  const uint64_t header_bytes = text.size();
  std::memcpy(file, &header_bytes, 8);
  std::memcpy(file + 8, text.data(), text.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t elements = tensors[i].elements();
    uint16_t* const to = reinterpret_cast<uint16_t*>(file + data + tensors[i].begin);
    if (tensors[i].ones) {
      std::fill_n(to, elements, FloatToBf16(1.0f));
      continue;
    }
    pool->ParallelFor((elements + kBlockElements - 1) / kBlockElements, [&](int64_t block) {
      const int64_t begin = block * kBlockElements;
      Fill(to + begin, std::min(kBlockElements, elements - begin),
           Mix(Mix(flags.seed) + i) + static_cast<uint64_t>(begin),
           tensors[i].adds ? static_cast<float>(flags.added) : 1.0f);
    });
  }
  if (flags.alike > 0) {
    MakeAlike(reinterpret_cast<uint16_t*>(file + data + tensors[0].begin), flags.shape, flags.alike,
              pool);
  }
  munmap(map, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status Validate(const Flags& flags) {
  const Shape& s = flags.shape;
  if (!(flags.alike >= 0 && flags.alike <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("alike=", flags.alike, " is outside [0, 1]"));
  }
  if (!(flags.added >= 0 && flags.added <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("added=", flags.added, " is outside [0, 1]"));
  }
  for (const int64_t n :
       {s.layers, s.hidden, s.ffn, s.heads, s.kv_heads, s.head_dim, s.vocab, s.max_positions}) {
    if (n < 1) return absl::InvalidArgumentError("every size must be at least 1");
  }
  if (s.heads % s.kv_heads == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("heads=", s.heads, " is not a multiple of kv_heads=", s.kv_heads));
}

absl::Status Run(const Flags& flags) {
  RETURN_IF_ERROR(Validate(flags));
  std::error_code error;
  fs::create_directories(flags.out, error);
  if (error) return ErrnoStatus(error.value(), flags.out);
  RETURN_IF_ERROR(WriteFileAtomically(flags.out + "/config.json",
                                      DumpJson(Config(flags.shape), JsonLetters::kUtf8, 2)));
  if (!flags.tokenizer.empty()) {
    int copied = 0;
    for (const char* name : {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}) {
      const fs::path from = fs::path(flags.tokenizer) / name;
      if (!fs::exists(from)) continue;
      fs::copy_file(from, fs::path(flags.out) / name, fs::copy_options::overwrite_existing, error);
      if (error) return ErrnoStatus(error.value(), from.string());
      ++copied;
    }
    if (copied == 0) return absl::NotFoundError(absl::StrCat("no tokenizer in ", flags.tokenizer));
  }
  ThreadPool pool(UsableCores() - 1);
  return WriteWeights(flags.out + "/model.safetensors", Tensors(flags.shape), flags, &pool);
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  CLI::App app(
      "Write a random checkpoint of any shape, to measure with; the default is Llama-3.1-8B's");
  carrel::Flags flags;
  carrel::Shape& shape = flags.shape;
  app.add_option("--out", flags.out, "folder to write; created if absent")->required();
  app.add_option("--tokenizer", flags.tokenizer, "folder to copy a tokenizer from");
  app.add_option("--layers", shape.layers)->capture_default_str();
  app.add_option("--hidden", shape.hidden)->capture_default_str();
  app.add_option("--ffn", shape.ffn)->capture_default_str();
  app.add_option("--heads", shape.heads)->capture_default_str();
  app.add_option("--kv-heads", shape.kv_heads)->capture_default_str();
  app.add_option("--head-dim", shape.head_dim)->capture_default_str();
  app.add_option("--vocab", shape.vocab)->capture_default_str();
  app.add_option("--max-positions", shape.max_positions)->capture_default_str();
  app.add_option("--rope-theta", shape.rope_theta)->capture_default_str();
  app.add_flag("--tied", shape.tied, "the head is the embedding");
  app.add_option("--seed", flags.seed)->capture_default_str();
  app.add_option("--alike", flags.alike,
                 "cosine of two tokens' embeddings: with it, that of their queries grows, and with "
                 "these the rows that one token attends to after another")
      ->capture_default_str();
  app.add_option("--added", flags.added,
                 "scale of what attention and MLP add to the hidden state: with less, tokens stay "
                 "as alike through the layers as their embeddings are")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = carrel::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "make-model: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : absl::IsInvalidArgument(status) ? 2 : 1;
}
