// What:      a LoRA adapter in PEFT's form: adapter_config.json and adapter_model.safetensors.
// Math:      y = W x + scale B (A x), with scale = lora_alpha / r, or lora_alpha / sqrt(r) with
//            use_rslora.
// Source:    Hu et al., "LoRA"; the files that PEFT up to 0.21 writes (docs/decisions/031-adapters.md).
// Edge:      every tensor of the file is used, and every projection that target_modules names, by a list of
//            names or a pattern that matches all of "model.layers.N.self_attn.q_proj", has its two in
//            every layer (of layers_to_transform, if given).
// Errors:    NotFound no adapter there; InvalidArgument a tensor that is missing, of another shape
//            or dtype, or not of the model (names it); Unimplemented an option of PEFT that we do
//            not run (names field and value): other methods, DoRA, biases, ranks per module,
//            modules that are saved whole, initialisations that change the base's weights.
// Ownership: matrices point into the mapped file, which the Adapter owns.   Threads: immutable.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/layer/linear/linear.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace carrel::model {

enum class Projection : uint8_t { kQ = 0, kK, kV, kO, kGate, kUp, kDown };
inline constexpr int kProjections = 7;

struct LowRank {
  kernels::WeightMatrix a;  // [rank, in]
  kernels::WeightMatrix b;  // [out, rank]
  float scale = 1;
};

class Adapter {
 public:
  static absl::StatusOr<std::shared_ptr<const Adapter>> Load(const std::string& adapter_dir,
                                                             const ModelConfig& config);

  // Null where nothing is added.
  const LowRank* Find(Layer layer, Projection projection) const;

  // Of scale, and of name, dtype, shape and bytes of every tensor.
  const std::string& sha256() const { return sha256_; }
  const ModelFiles& files() const { return file_.files(); }

 private:
  friend class AdapterBuilder;
  Adapter(Safetensors file, int32_t layers)
      : file_(std::move(file)), layers_(static_cast<size_t>(layers)) {}

  Safetensors file_;
  std::vector<std::array<LowRank, kProjections>> layers_;  // a.data null: nothing is added
  std::string sha256_;
};

// Rope and max_position_embeddings as config.json in the adapter's folder has them, if there is
// one. InvalidArgument if anything else in it differs from the base's (names it).
absl::Status ReadAdapterConfig(const std::string& adapter_dir, ModelConfig& config);

// InvalidArgument if the model's folder holds an adapter that is not `adapter_dir` (empty: none):
// the answers would be another model's.
absl::Status CheckNoOtherAdapter(const std::string& model_dir, const std::string& adapter_dir);

// scale B A, part by part, for those who merge it into the matrix.
class LowRankProduct {
 public:
  // Cost: rank (in + out) floats.
  explicit LowRankProduct(const LowRank& added);
  // Adds elements [begin, begin + count) of the row-major [out, in] product, summed in float over
  // ranks in order.   Threads: reentrant.
  void AddTo(int64_t begin, int64_t count, float* values) const;

 private:
  const int64_t rank_, in_;
  std::vector<float> a_, b_;  // b_ times scale
};

}  // namespace carrel::model
