// What:      a checkpoint's weights by their place in the model, checked against its config.
// Ownership: matrices point into the mapped checkpoint, which this owns; norm weights are widened
//            once, here.
// Threads:   immutable.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/layer/quantized_linear/quantized_linear.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace carrel::model {

// A matrix in its own dtype, or as the blocks of a GGUF file: then data and bias of the base are
// null, its dtype means nothing, out and in are set.
struct Matrix : kernels::WeightMatrix {
  std::optional<kernels::QuantizedMatrix> blocks;
};

struct ExpertWeights {
  Matrix gate, up, down;
};

struct LayerWeights {
  Matrix q, k, v, o;
  Matrix gate, up, down;                        // without data in a layer of experts
  Matrix router;                                // [experts, hidden]
  std::vector<ExpertWeights> experts;           // empty in a layer without
  std::vector<float> attention_norm, mlp_norm;  // [hidden_size]
  // Of what attention and MLP add; empty but for Gemma. Norms of Gemma have 1 added to them here.
  std::vector<float> attention_post_norm, mlp_post_norm;
  std::vector<float> q_norm, k_norm;  // [head_dim]; empty without qk_norm
};

// A tensor as its file has it: what the digest of the weights covers.
struct StoredTensor {
  std::string name;
  std::string type;
  std::vector<int64_t> shape;
  absl::string_view bytes;
};

class Weights;

// Tensors that are not, or not all, in *.safetensors files.
struct TensorSource {
  std::string where;    // what messages begin with
  Safetensors tensors;  // under the names of a Hugging Face checkpoint
  // Matrices that stay in blocks, by the same names; in no other list. Their biases are f32.
  std::map<std::string, kernels::QuantizedMatrix, std::less<>> blocks;
  std::vector<StoredTensor> stored;   // by name
  ModelFiles files;                   // that all of it is from
  std::shared_ptr<const void> owner;  // of everything that the others view
  // What the file calls a tensor, for messages.
  std::function<std::string(absl::string_view)> name_in_file;
  // The same weights without blocks; where there are any.
  std::function<absl::StatusOr<std::shared_ptr<const Weights>>(ThreadPool*)> widened;
};

class Weights {
 public:
  // Invariants
  //   1. Every tensor that the config implies is present with its shape and a floating dtype.
  //   2. No other tensor is, except those known to carry nothing (rotary tables).
  static absl::StatusOr<std::shared_ptr<const Weights>> Load(const std::string& model_dir,
                                                             const ModelConfig& config);
  static absl::StatusOr<std::shared_ptr<const Weights>> Build(TensorSource source,
                                                              const ModelConfig& config);

  const Matrix& embedding() const { return embedding_; }  // [vocab, hidden]
  const Matrix& head() const { return head_; }            // the embedding if they are tied
  const LayerWeights& layer(Layer layer) const { return layers_[layer.value()]; }
  const std::vector<float>& final_norm() const { return final_norm_; }
  const Safetensors& checkpoint() const { return source_.tensors; }
  // Matrices in blocks, by the names of a Hugging Face checkpoint; checkpoint() has all the others.
  const std::map<std::string, kernels::QuantizedMatrix, std::less<>>& blocks() const {
    return source_.blocks;
  }
  const std::vector<StoredTensor>& stored() const { return source_.stored; }
  const ModelFiles& files() const { return source_.files; }
  // What the file calls the tensor of this name.
  std::string NameInFile(absl::string_view name) const {
    return source_.name_in_file ? source_.name_in_file(name) : std::string(name);
  }

  // The same weights with every matrix in f32, f16 or bf16, for who cannot multiply with blocks:
  // null if these are. Cost: as gguf_weights.h says.
  absl::StatusOr<std::shared_ptr<const Weights>> Widened(ThreadPool* pool) const;

 private:
  friend class WeightsBuilder;
  explicit Weights(TensorSource source) : source_(std::move(source)) {}

  TensorSource source_;
  Matrix embedding_, head_;
  std::vector<LayerWeights> layers_;
  std::vector<float> final_norm_;
};

}  // namespace carrel::model
