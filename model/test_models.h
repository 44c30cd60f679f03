// What: models that the tests run, a forward pass with dense attention, and where the shared
//       checkpoints are. Tests only.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "model/cpu_backend.h"
#include "model/transformer.h"

namespace carrel::model {

// SharedFolder() of common/test_folders.h; nothing if absent.
std::optional<std::string> SharedDir();
std::string DemoModelDir();

struct TestModel {
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
  std::shared_ptr<const Adapter> adapter;  // Load leaves it null
  static absl::StatusOr<TestModel> Load(const std::string& model_dir);
};

// Dense causal attention that keeps K and V of every layer: [kv_heads, rows, head_dim] each.
class DenseAttention : public Attention {
 public:
  // `reference`: plain loops with double sums, else the blocked kernel. `windows`: of each layer, the
  // newest tokens that count, 0 for all; empty: all in every layer.
  DenseAttention(const AttentionShape& shape, int64_t capacity, bool reference,
                 std::vector<int64_t> windows = {});
  absl::Status Attend(const AttentionInput& input, float* attended) override;

  // Rows [0, rows) of a layer, [kv_heads, rows, head_dim].
  std::vector<float> K(int32_t layer, int64_t rows) const { return Rows(k_[layer], rows); }
  std::vector<float> V(int32_t layer, int64_t rows) const { return Rows(v_[layer], rows); }

 private:
  std::vector<float> Rows(const std::vector<float>& cache, int64_t rows) const;
  const AttentionShape shape_;
  const int64_t capacity_;
  const bool reference_;
  const std::vector<int64_t> windows_;
  std::vector<std::vector<float>> k_, v_;  // per layer [kv_heads, capacity, head_dim]
};

// Runs tokens through every layer, `block` at a time, and returns the logits [tokens, vocab]
// (of the last token alone if last_only).
absl::StatusOr<std::vector<float>> Forward(const TestModel& model, absl::Span<const TokenId> tokens,
                                           Position first_position, int64_t block, ThreadPool* pool,
                                           Attention& attention, bool last_only = false);

TokenId ArgMax(absl::Span<const float> logits);

// A random checkpoint of what config.json (text) describes, written to the folder; f32.
absl::Status WriteRandomModel(const std::string& folder, const std::string& config_json,
                              uint64_t seed);

// The forward pass again, in plain double loops straight from the equations, without our kernels.
std::vector<float> ReferenceLogits(const TestModel& model, absl::Span<const TokenId> tokens);

}  // namespace carrel::model
