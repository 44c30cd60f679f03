// What:      a checkpoint's weights by their place in the model, checked against its config.
// Ownership: matrices point into the mapped checkpoint, which this owns; norm weights are widened
//            once, here.
// Threads:   immutable.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/linear/linear.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace carrel::model {

struct ExpertWeights {
  kernels::WeightMatrix gate, up, down;
};

struct LayerWeights {
  kernels::WeightMatrix q, k, v, o;
  kernels::WeightMatrix gate, up, down;         // without data in a layer of experts
  kernels::WeightMatrix router;                 // [experts, hidden]
  std::vector<ExpertWeights> experts;           // empty in a layer without
  std::vector<float> attention_norm, mlp_norm;  // [hidden_size]
  std::vector<float> q_norm, k_norm;            // [head_dim]; empty without qk_norm
};

// A tensor as its file has it: what the digest of the weights covers.
struct StoredTensor {
  std::string name;
  std::string type;
  std::vector<int64_t> shape;
  absl::string_view bytes;
};

// Tensors that are not, or not all, in *.safetensors files.
struct TensorSource {
  std::string where;                  // what messages begin with
  Safetensors tensors;                // under the names of a Hugging Face checkpoint
  std::vector<StoredTensor> stored;   // by name
  std::shared_ptr<const void> owner;  // of everything that the others view
  // What the file calls a tensor, for messages.
  std::function<std::string(absl::string_view)> name_in_file;
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

  const kernels::WeightMatrix& embedding() const { return embedding_; }  // [vocab, hidden]
  const kernels::WeightMatrix& head() const { return head_; }  // the embedding if they are tied
  const LayerWeights& layer(Layer layer) const { return layers_[layer.value()]; }
  const std::vector<float>& final_norm() const { return final_norm_; }
  const Safetensors& checkpoint() const { return source_.tensors; }
  const std::vector<StoredTensor>& stored() const { return source_.stored; }

 private:
  friend class WeightsBuilder;
  explicit Weights(TensorSource source) : source_(std::move(source)) {}

  TensorSource source_;
  kernels::WeightMatrix embedding_, head_;
  std::vector<LayerWeights> layers_;
  std::vector<float> final_norm_;
};

}  // namespace carrel::model
