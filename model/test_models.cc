#include "model/test_models.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "kernels/attention/prefill_attention/prefill_attention.h"
#include "model/weights.h"

namespace carrel::model {

std::optional<std::string> SharedDir() {
  const std::string folder = SharedFolder();
  if (folder.empty()) return std::nullopt;
  return folder;
}

std::string DemoModelDir() { return SourceFolder() + "/models/demo"; }

absl::StatusOr<TestModel> TestModel::Load(const std::string& model_dir) {
  TestModel model;
  ASSIGN_OR_RETURN(model.config, LoadModelConfig(model_dir));
  ASSIGN_OR_RETURN(model.weights, LoadWeights(model_dir, model.config));
  return model;
}

DenseAttention::DenseAttention(const AttentionShape& shape, int64_t capacity, bool reference,
                               std::vector<int64_t> windows)
    : shape_(shape), capacity_(capacity), reference_(reference), windows_(std::move(windows)) {
  const size_t floats = static_cast<size_t>(shape.kv_heads * capacity * shape.head_dim);
  k_.assign(shape.layers, std::vector<float>(floats));
  v_ = k_;
}

absl::Status DenseAttention::Attend(const AttentionInput& input, float* attended) {
  CARREL_CHECK(input.first_position + input.n <= capacity_);
  const int64_t dim = shape_.head_dim;
  std::vector<float>& k = k_[input.layer.value()];
  std::vector<float>& v = v_[input.layer.value()];
  for (int64_t i = 0; i < input.n; ++i) {
    for (int64_t h = 0; h < shape_.kv_heads; ++h) {
      const int64_t from = (i * shape_.kv_heads + h) * dim;
      const int64_t to = (h * capacity_ + input.first_position + i) * dim;
      std::copy_n(input.k + from, dim, k.begin() + to);
      std::copy_n(input.v + from, dim, v.begin() + to);
    }
  }
  std::vector<float> scratch(kernels::PrefillAttentionScratchFloats(dim));
  const int64_t window = windows_.empty() ? 0 : windows_[input.layer.value()];
  // One token at a time has the rows of its window for a text of its own.
  const int64_t tile = window > 0 ? 1 : kernels::kPrefillQueryTile;
  for (int64_t h = 0; h < shape_.q_heads; ++h) {
    for (int64_t begin = 0; begin < input.n; begin += tile) {
      const int64_t skipped =
          window > 0 ? std::max<int64_t>(0, input.first_position + begin + 1 - window) : 0;
      const int64_t kv_offset = (h / shape_.group() * capacity_ + skipped) * dim;
      kernels::PrefillAttentionParams params;
      params.q_stride = params.out_stride = shape_.q_heads * dim;
      params.q = input.q + begin * params.q_stride + h * dim;
      params.out = attended + begin * params.out_stride + h * dim;
      params.n = std::min(tile, input.n - begin);
      params.first_position = input.first_position + begin - skipped;
      params.k = k.data() + kv_offset;
      params.v = v.data() + kv_offset;
      params.head_dim = dim;
      params.scale = 1.0f / std::sqrt(static_cast<float>(dim));
      if (reference_) {
        kernels::RefPrefillAttention(params);
      } else {
        kernels::PrefillAttention(params, scratch.data());
      }
    }
  }
  return absl::OkStatus();
}

std::vector<float> DenseAttention::Rows(const std::vector<float>& cache, int64_t rows) const {
  std::vector<float> result;
  for (int64_t h = 0; h < shape_.kv_heads; ++h) {
    const auto begin = cache.begin() + h * capacity_ * shape_.head_dim;
    result.insert(result.end(), begin, begin + rows * shape_.head_dim);
  }
  return result;
}

absl::StatusOr<std::vector<float>> Forward(const TestModel& model, absl::Span<const TokenId> tokens,
                                           Position first_position, int64_t block, ThreadPool* pool,
                                           Attention& attention, bool last_only) {
  const std::unique_ptr<Backend> backend =
      MakeCpuBackend(model.config, model.weights, pool, RopeStage::kApplied, model.adapter);
  Transformer transformer(backend.get());
  const int64_t total = static_cast<int64_t>(tokens.size());
  const int64_t vocab = model.config.vocab_size;
  std::vector<float> logits(static_cast<size_t>((last_only ? 1 : total) * vocab));
  std::vector<float> hidden;
  for (int64_t begin = 0; begin < total; begin += block) {
    const int64_t n = std::min(block, total - begin);
    hidden.resize(static_cast<size_t>(n * model.config.hidden_size));
    RETURN_IF_ERROR(backend->Embed(tokens.subspan(begin, n), hidden.data()));
    for (int32_t layer = 0; layer < model.config.shape.layers; ++layer) {
      RETURN_IF_ERROR(transformer.ForwardLayer(Layer(layer), n, first_position + begin,
                                               hidden.data(), attention));
    }
    if (!last_only) {
      RETURN_IF_ERROR(backend->Logits(hidden.data(), n, logits.data() + begin * vocab));
    } else if (begin + n == total) {
      RETURN_IF_ERROR(
          backend->Logits(hidden.data() + (n - 1) * model.config.hidden_size, 1, logits.data()));
    }
  }
  return logits;
}

TokenId ArgMax(absl::Span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

absl::Status WriteRandomModel(const std::string& folder, const std::string& config_json,
                              uint64_t seed) {
  RETURN_IF_ERROR(WriteFileAtomically(folder + "/config.json", config_json));
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(folder));
  std::mt19937_64 rng(seed);
  std::vector<std::vector<float>> storage;
  std::vector<NamedTensor> tensors;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, float mean) {
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    std::normal_distribution<float> normal(mean, 0.1f);
    std::vector<float>& values = storage.emplace_back(static_cast<size_t>(count));
    for (float& x : values) x = normal(rng);
    const absl::string_view bytes(reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(float));
    tensors.push_back({name, {DType::kF32, std::move(shape), bytes}});
  };
  const auto linear = [&](const std::string& prefix, int64_t out, int64_t in, bool bias) {
    add(prefix + ".weight", {out, in}, 0.0f);
    if (bias) add(prefix + ".bias", {out}, 0.3f);
  };
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t dim = config.shape.head_dim;
  const int64_t q_width = config.shape.q_heads * dim, kv_width = config.shape.kv_heads * dim;
  linear("model.embed_tokens", config.vocab_size, hidden, false);
  for (int32_t layer = 0; layer < config.shape.layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    add(prefix + "input_layernorm.weight", {hidden}, 1.0f);
    add(prefix + "post_attention_layernorm.weight", {hidden}, 1.0f);
    linear(prefix + "self_attn.q_proj", q_width, hidden, config.qkv_bias);
    linear(prefix + "self_attn.k_proj", kv_width, hidden, config.qkv_bias);
    linear(prefix + "self_attn.v_proj", kv_width, hidden, config.qkv_bias);
    linear(prefix + "self_attn.o_proj", hidden, q_width, config.output_bias);
    if (config.qk_norm) {
      add(prefix + "self_attn.q_norm.weight", {dim}, 1.0f);
      add(prefix + "self_attn.k_norm.weight", {dim}, 1.0f);
    }
    if (config.experts.In(Layer(layer))) {
      linear(prefix + "mlp.gate", config.experts.count, hidden, false);
      for (int64_t e = 0; e < config.experts.count; ++e) {
        const std::string expert = absl::StrCat(prefix, "mlp.experts.", e, ".");
        linear(expert + "gate_proj", config.experts.intermediate_size, hidden, false);
        linear(expert + "up_proj", config.experts.intermediate_size, hidden, false);
        linear(expert + "down_proj", hidden, config.experts.intermediate_size, false);
      }
      continue;
    }
    linear(prefix + "mlp.gate_proj", inner, hidden, config.mlp_bias);
    linear(prefix + "mlp.up_proj", inner, hidden, config.mlp_bias);
    linear(prefix + "mlp.down_proj", hidden, inner, config.mlp_bias);
  }
  add("model.norm.weight", {hidden}, 1.0f);
  if (!config.tie_word_embeddings) linear("lm_head", config.vocab_size, hidden, false);
  return WriteSafetensors(folder + "/model.safetensors", tensors);
}

namespace {

using Row = std::vector<double>;

class ReferenceModel {
 public:
  explicit ReferenceModel(const TestModel& model)
      : config_(model.config), file_(model.weights->checkpoint()) {}

  std::vector<float> Logits(absl::Span<const TokenId> tokens) const {
    const Row table = Tensor("model.embed_tokens.weight");
    std::vector<Row> x;
    for (TokenId token : tokens) {
      const auto begin = table.begin() + token * config_.hidden_size;
      x.emplace_back(begin, begin + config_.hidden_size);
    }
    for (int32_t layer = 0; layer < config_.shape.layers; ++layer) RunLayer(layer, x);
    std::vector<float> logits;
    const std::string head = config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head";
    for (const Row& row : x) {
      const Row out = Linear(head, Norm(row, Tensor("model.norm.weight")));
      logits.insert(logits.end(), out.begin(), out.end());
    }
    return logits;
  }

 private:
  Row Tensor(const std::string& name) const {
    const TensorView view = *file_.Get(name);
    std::vector<float> values(static_cast<size_t>(view.elements()));
    WidenToFloat(view.dtype, view.bytes.data(), view.elements(), values.data());
    return Row(values.begin(), values.end());
  }

  Row Linear(const std::string& prefix, const Row& x) const {
    const Row w = Tensor(prefix + ".weight");
    Row y(w.size() / x.size());
    if (file_.Has(prefix + ".bias")) y = Tensor(prefix + ".bias");
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t c = 0; c < x.size(); ++c) y[o] += w[o * x.size() + c] * x[c];
    }
    return y;
  }

  Row Norm(const Row& x, const Row& w) const {
    double squares = 0;
    for (double value : x) squares += value * value;
    const double scale =
        1.0 / std::sqrt(squares / static_cast<double>(x.size()) + config_.rms_norm_eps);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * w[i];
    return y;
  }

  // The heads of one token: normed if the model does so, then rotated.
  void FinishHeads(Row& x, const std::string& norm, int64_t position) const {
    const size_t dim = config_.shape.head_dim;
    const std::vector<float> inv_freq = RopeInvFreq(config_.rope, config_.shape.head_dim);
    for (size_t begin = 0; begin < x.size(); begin += dim) {
      Row head(x.begin() + begin, x.begin() + begin + dim);
      if (config_.qk_norm) head = Norm(head, Tensor(norm));
      for (double& x : head) x *= config_.rope.attention_factor;
      for (size_t c = 0; c < dim / 2; ++c) {
        const double angle = static_cast<double>(position) * inv_freq[c];
        x[begin + c] = head[c] * std::cos(angle) - head[c + dim / 2] * std::sin(angle);
        x[begin + c + dim / 2] = head[c + dim / 2] * std::cos(angle) + head[c] * std::sin(angle);
      }
    }
  }

  Row Attend(const Row& q, const std::vector<Row>& k, const std::vector<Row>& v,
             size_t rows) const {
    const size_t dim = config_.shape.head_dim;
    Row out(q.size(), 0.0);
    for (size_t h = 0; h < static_cast<size_t>(config_.shape.q_heads); ++h) {
      const size_t kv = h / config_.shape.group() * dim;
      Row weight(rows, 0.0);
      for (size_t j = 0; j < rows; ++j) {
        for (size_t c = 0; c < dim; ++c) weight[j] += q[h * dim + c] * k[j][kv + c];
        weight[j] /= std::sqrt(static_cast<double>(dim));
      }
      const double top = *std::max_element(weight.begin(), weight.end());
      double sum = 0;
      for (double& w : weight) sum += w = std::exp(w - top);
      for (size_t j = 0; j < rows; ++j) {
        for (size_t c = 0; c < dim; ++c) out[h * dim + c] += weight[j] / sum * v[j][kv + c];
      }
    }
    return out;
  }

  void RunLayer(int32_t layer, std::vector<Row>& x) const {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    const std::string attention = prefix + "self_attn.";
    std::vector<Row> q, k, v;
    for (size_t i = 0; i < x.size(); ++i) {
      const Row normed = Norm(x[i], Tensor(prefix + "input_layernorm.weight"));
      q.push_back(Linear(attention + "q_proj", normed));
      k.push_back(Linear(attention + "k_proj", normed));
      v.push_back(Linear(attention + "v_proj", normed));
      FinishHeads(q[i], attention + "q_norm.weight", static_cast<int64_t>(i));
      FinishHeads(k[i], attention + "k_norm.weight", static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < x.size(); ++i) {
      Add(Linear(attention + "o_proj", Attend(q[i], k, v, i + 1)), x[i]);
      const Row normed = Norm(x[i], Tensor(prefix + "post_attention_layernorm.weight"));
      if (!config_.experts.In(Layer(layer))) {
        Add(Mlp(prefix + "mlp.", normed), x[i]);
        continue;
      }
      Row p = Linear(prefix + "mlp.gate", normed);
      double sum = 0;
      for (double& value : p) sum += value = std::exp(value);
      std::vector<size_t> order(p.size());
      for (size_t e = 0; e < order.size(); ++e) order[e] = e;
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
      order.resize(static_cast<size_t>(config_.experts.per_token));
      double of_chosen = 0;
      for (size_t e : order) of_chosen += p[e];
      for (size_t e : order) {
        Row out = Mlp(absl::StrCat(prefix, "mlp.experts.", e, "."), normed);
        for (double& value : out) value *= p[e] / (config_.experts.normalize ? of_chosen : sum);
        Add(out, x[i]);
      }
    }
  }

  Row Mlp(const std::string& prefix, const Row& normed) const {
    Row gate = Linear(prefix + "gate_proj", normed);
    const Row up = Linear(prefix + "up_proj", normed);
    for (size_t c = 0; c < gate.size(); ++c) gate[c] *= up[c] / (1.0 + std::exp(-gate[c]));
    return Linear(prefix + "down_proj", gate);
  }

  static void Add(const Row& from, Row& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  }

  const ModelConfig& config_;
  const Safetensors& file_;
};

}  // namespace

std::vector<float> ReferenceLogits(const TestModel& model, absl::Span<const TokenId> tokens) {
  return ReferenceModel(model).Logits(tokens);
}

}  // namespace carrel::model
