#include "model/weights.h"

#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "common/checksum.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/cpu_backend.h"
#include "model/gguf_weights.h"

namespace carrel::model {
namespace {

// Tables that older checkpoints store and that follow from the config.
bool CarriesNothing(absl::string_view name) { return absl::EndsWith(name, ".rotary_emb.inv_freq"); }

}  // namespace

// Takes the tensors one by one out of the checkpoint; what is left at the end is unexpected.
class WeightsBuilder {
 public:
  WeightsBuilder(const ModelConfig& config, TensorSource source)
      : config_(config), weights_(new Weights(std::move(source))) {}

  absl::StatusOr<std::shared_ptr<const Weights>> Build() {
    const int64_t hidden = config_.hidden_size;
    ASSIGN_OR_RETURN(weights_->embedding_,
                     TakeMatrix("model.embed_tokens", config_.vocab_size, hidden, false));
    for (int32_t layer = 0; layer < config_.shape.layers; ++layer) {
      ASSIGN_OR_RETURN(LayerWeights built, BuildLayer(Layer(layer)));
      weights_->layers_.push_back(std::move(built));
    }
    ASSIGN_OR_RETURN(weights_->final_norm_, Norm("model.norm", hidden));
    RETURN_IF_ERROR(BuildHead());
    RETURN_IF_ERROR(RefuseLeftovers());
    return std::shared_ptr<const Weights>(std::move(weights_));
  }

 private:
  absl::Status Bad(absl::string_view name, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(weights_->source_.where, ": tensor \"",
                                                   Shown(weights_->NameInFile(name), 200), "\" ",
                                                   what));
  }

  absl::StatusOr<TensorView> Take(const std::string& name, absl::Span<const int64_t> shape) {
    absl::StatusOr<TensorView> view = weights_->checkpoint().Get(name);
    if (!view.ok()) {
      return Bad(name, absl::StrCat("is missing; expected f32, f16 or bf16 ", ShapeText(shape)));
    }
    if (!view->floating() || absl::MakeConstSpan(view->shape) != shape) {
      return Bad(name, absl::StrCat("is ", DTypeName(view->dtype), " ", ShapeText(view->shape),
                                    ", expected f32, f16 or bf16 ", ShapeText(shape)));
    }
    taken_.insert(name);
    return view;
  }

  // prefix.weight [out, in] and, if any, prefix.bias [out].
  absl::StatusOr<Matrix> TakeMatrix(const std::string& prefix, int64_t out, int64_t in, bool bias) {
    Matrix matrix;
    matrix.out = out;
    matrix.in = in;
    const auto blocks = weights_->source_.blocks.find(prefix + ".weight");
    if (blocks != weights_->source_.blocks.end()) {
      RETURN_IF_ERROR(TakeBlocks(blocks->first, blocks->second, matrix));
    } else {
      ASSIGN_OR_RETURN(const TensorView weight, Take(prefix + ".weight", {out, in}));
      matrix.data = weight.bytes.data();
      matrix.dtype = weight.dtype;
    }
    if (!bias) return matrix;
    ASSIGN_OR_RETURN(const TensorView view, Take(prefix + ".bias", {out}));
    const DType dtype = matrix.blocks ? DType::kF32 : matrix.dtype;
    if (view.dtype != dtype) {
      return Bad(prefix + ".bias", absl::StrCat("is ", DTypeName(view.dtype), ", expected ",
                                                DTypeName(dtype), " as its weight is"));
    }
    (matrix.blocks ? matrix.blocks->bias : matrix.bias) = view.bytes.data();
    return matrix;
  }

  absl::Status TakeBlocks(const std::string& name, const kernels::QuantizedMatrix& blocks,
                          Matrix& matrix) {
    if (blocks.out != matrix.out || blocks.in != matrix.in) {
      return Bad(name, absl::StrCat("is ", kernels::TraitsOf(blocks.type).name, " ",
                                    ShapeText({blocks.out, blocks.in}), ", expected ",
                                    ShapeText({matrix.out, matrix.in})));
    }
    matrix.blocks = blocks;
    taken_.insert(name);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t size) {
    ASSIGN_OR_RETURN(const TensorView view, Take(name, {size}));
    std::vector<float> values(static_cast<size_t>(size));
    WidenToFloat(view.dtype, view.bytes.data(), size, values.data());
    return values;
  }

  // By what a normalised number is multiplied.
  absl::StatusOr<std::vector<float>> Norm(const std::string& prefix, int64_t size) {
    ASSIGN_OR_RETURN(std::vector<float> values, Vector(prefix + ".weight", size));
    if (config_.gemma) {
      for (float& value : values) value += 1.0f;
    }
    return values;
  }

  absl::StatusOr<LayerWeights> BuildLayer(Layer layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer.value(), ".");
    const int64_t hidden = config_.hidden_size;
    const int64_t inner = config_.intermediate_size;
    const int64_t head_dim = config_.shape.head_dim;
    const int64_t q_width = config_.shape.q_heads * head_dim;
    const int64_t kv_width = config_.shape.kv_heads * head_dim;
    const std::string attention = prefix + "self_attn.";
    const std::string mlp = prefix + "mlp.";

    LayerWeights w;
    ASSIGN_OR_RETURN(w.attention_norm, Norm(prefix + "input_layernorm", hidden));
    if (config_.gemma) {
      ASSIGN_OR_RETURN(w.attention_post_norm, Norm(prefix + "post_attention_layernorm", hidden));
      ASSIGN_OR_RETURN(w.mlp_norm, Norm(prefix + "pre_feedforward_layernorm", hidden));
      ASSIGN_OR_RETURN(w.mlp_post_norm, Norm(prefix + "post_feedforward_layernorm", hidden));
    } else {
      ASSIGN_OR_RETURN(w.mlp_norm, Norm(prefix + "post_attention_layernorm", hidden));
    }
    ASSIGN_OR_RETURN(w.q, TakeMatrix(attention + "q_proj", q_width, hidden, config_.qkv_bias));
    ASSIGN_OR_RETURN(w.k, TakeMatrix(attention + "k_proj", kv_width, hidden, config_.qkv_bias));
    ASSIGN_OR_RETURN(w.v, TakeMatrix(attention + "v_proj", kv_width, hidden, config_.qkv_bias));
    ASSIGN_OR_RETURN(w.o, TakeMatrix(attention + "o_proj", hidden, q_width, config_.output_bias));
    if (config_.qk_norm) {
      ASSIGN_OR_RETURN(w.q_norm, Norm(attention + "q_norm", head_dim));
      ASSIGN_OR_RETURN(w.k_norm, Norm(attention + "k_norm", head_dim));
    }
    if (config_.experts.In(layer)) {
      RETURN_IF_ERROR(BuildExperts(mlp, w));
      return w;
    }
    ASSIGN_OR_RETURN(w.gate, TakeMatrix(mlp + "gate_proj", inner, hidden, config_.mlp_bias));
    ASSIGN_OR_RETURN(w.up, TakeMatrix(mlp + "up_proj", inner, hidden, config_.mlp_bias));
    ASSIGN_OR_RETURN(w.down, TakeMatrix(mlp + "down_proj", hidden, inner, config_.mlp_bias));
    return w;
  }

  absl::Status BuildExperts(const std::string& mlp, LayerWeights& w) {
    const int64_t hidden = config_.hidden_size, inner = config_.experts.intermediate_size;
    ASSIGN_OR_RETURN(w.router, TakeMatrix(mlp + "gate", config_.experts.count, hidden, false));
    for (int64_t e = 0; e < config_.experts.count; ++e) {
      const std::string expert = absl::StrCat(mlp, "experts.", e, ".");
      ExpertWeights& one = w.experts.emplace_back();
      ASSIGN_OR_RETURN(one.gate, TakeMatrix(expert + "gate_proj", inner, hidden, false));
      ASSIGN_OR_RETURN(one.up, TakeMatrix(expert + "up_proj", inner, hidden, false));
      ASSIGN_OR_RETURN(one.down, TakeMatrix(expert + "down_proj", hidden, inner, false));
    }
    return absl::OkStatus();
  }

  absl::Status BuildHead() {
    weights_->head_ = weights_->embedding_;
    if (config_.tie_word_embeddings && !weights_->checkpoint().Has("lm_head.weight") &&
        weights_->source_.blocks.count("lm_head.weight") == 0) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const Matrix head,
                     TakeMatrix("lm_head", config_.vocab_size, config_.hidden_size, false));
    if (!config_.tie_word_embeddings) {
      weights_->head_ = head;
      return absl::OkStatus();
    }
    // A second copy of a tied matrix is harmless only if it is a copy.
    ASSIGN_OR_RETURN(const TensorView embedding,
                     weights_->checkpoint().Get("model.embed_tokens.weight"));
    ASSIGN_OR_RETURN(const TensorView stored, weights_->checkpoint().Get("lm_head.weight"));
    if (stored.dtype != embedding.dtype || stored.bytes != embedding.bytes) {
      return Bad("lm_head.weight",
                 "differs from model.embed_tokens.weight although tie_word_embeddings is true");
    }
    return absl::OkStatus();
  }

  absl::Status RefuseLeftovers() const {
    for (const auto& [name, view] : weights_->checkpoint().tensors()) {
      if (taken_.count(name) == 0 && !CarriesNothing(name)) {
        return Bad(name, absl::StrCat("(", DTypeName(view.dtype), " ", ShapeText(view.shape),
                                      ") is not part of the model that config.json describes"));
      }
    }
    for (const auto& [name, blocks] : weights_->source_.blocks) {
      if (taken_.count(name) == 0) {
        return Bad(name, absl::StrCat("(", kernels::TraitsOf(blocks.type).name, " ",
                                      ShapeText({blocks.out, blocks.in}),
                                      ") is not part of the model that the metadata describe"));
      }
    }
    return absl::OkStatus();
  }

  const ModelConfig& config_;
  std::unique_ptr<Weights> weights_;
  std::set<std::string, std::less<>> taken_;
};

absl::StatusOr<std::shared_ptr<const Weights>> Weights::Load(const std::string& model_dir,
                                                             const ModelConfig& config) {
  TensorSource source;
  source.where = model_dir;
  ASSIGN_OR_RETURN(source.tensors, Safetensors::OpenModel(model_dir));
  source.files = source.tensors.files();
  for (const auto& [name, view] : source.tensors.tensors()) {
    source.stored.push_back({name, std::string(DTypeName(view.dtype)), view.shape, view.bytes});
  }
  return Build(std::move(source), config);
}

absl::StatusOr<std::shared_ptr<const Weights>> Weights::Build(TensorSource source,
                                                              const ModelConfig& config) {
  return WeightsBuilder(config, std::move(source)).Build();
}

absl::StatusOr<std::shared_ptr<const Weights>> Weights::Widened(ThreadPool* pool) const {
  if (source_.blocks.empty()) return nullptr;
  return source_.widened(pool);
}

absl::StatusOr<std::shared_ptr<const Weights>> LoadWeights(const std::string& model_dir,
                                                           const ModelConfig& config,
                                                           ThreadPool* pool) {
  if (IsGgufPath(model_dir)) {
    ASSIGN_OR_RETURN(std::shared_ptr<const Gguf> gguf, Gguf::Open(model_dir));
    return LoadGgufWeights(std::move(gguf), config, pool);
  }
  return Weights::Load(model_dir, config);
}

// One line per tensor, in name order: the length of the name, name, dtype, shape, digest of its
// bytes. The length keeps a name with a newline from imitating a line.
std::string WeightsSha256(const Weights& weights, ThreadPool* pool, const DigestCache* cache) {
  if (cache != nullptr) {
    return cache->Get("weights", weights.files(),
                      [&] { return WeightsSha256(weights, pool, nullptr); });
  }
  const std::vector<StoredTensor>& tensors = weights.stored();
  std::vector<std::string> digests(tensors.size());
  const auto digest = [&](int64_t i) { digests[i] = Sha256Hex(tensors[i].bytes); };
  if (pool != nullptr) {
    pool->ParallelFor(static_cast<int64_t>(tensors.size()), digest);
  } else {
    for (size_t i = 0; i < tensors.size(); ++i) digest(static_cast<int64_t>(i));
  }
  Sha256 all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& tensor = tensors[i];
    all.Update(absl::StrCat(tensor.name.size(), " ", tensor.name, " ", tensor.type, " ",
                            ShapeText(tensor.shape), " ", digests[i], "\n"));
  }
  return all.FinishHex();
}

}  // namespace carrel::model
