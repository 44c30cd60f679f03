// What:      the CPU backend: weights stay mapped in the checkpoint's dtype and are widened as they
//            are used; fp32 arithmetic.
// Errors:    Load: NotFound; InvalidArgument a tensor that is absent, has another shape or dtype
//            than config.json implies (names tensor, found, expected), or is not part of the model.
// Threads:   the pool's workers and the caller share the work in units that do not depend on their
//            number: results are the same bits for any pool. The pool may be null (the caller works
//            alone), may be shared with others, and must outlive the backend.
// Cost:      scratch of 256 tokens x (hidden_size + 2 intermediate_size) floats per thread,
//            whatever n, and with experts 256 x (experts + 2 hidden_size + 2 of their
//            intermediate_size) more; nothing is allocated in steady state.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "model/backend.h"
#include "model/digest_cache.h"
#include "model/safetensors.h"

namespace carrel::model {

// A checkpoint's weights, mapped and checked against its config (weights.h).   Threads: immutable.
class Weights;
class Adapter;  // adapter.h

// Of a folder, or a GGUF file (gguf_weights.h; the pool, which may be null, shares its widening).
absl::StatusOr<std::shared_ptr<const Weights>> LoadWeights(const std::string& model_dir,
                                                           const ModelConfig& config,
                                                           ThreadPool* pool = nullptr);

// SHA-256 over every tensor of the checkpoint in name order: name, dtype, shape, SHA-256 of its
// bytes; however they are spread over files.   Cost: reads all weights; one core per tensor, spread
// over the pool (which may be null). With a cache, nothing if the files have not changed since.
std::string WeightsSha256(const Weights& weights, ThreadPool* pool,
                          const DigestCache* cache = nullptr);

// Whether q and k leave the backend after RoPE, or before it: then who attends gives positions.
enum class RopeStage : uint8_t { kApplied = 0, kLeftOut = 1 };

// With an adapter (may be null), what it adds is computed beside each product: weights stay mapped
// in whatever form they have.
std::unique_ptr<Backend> MakeCpuBackend(const ModelConfig& config,
                                        std::shared_ptr<const Weights> weights, ThreadPool* pool,
                                        RopeStage rope = RopeStage::kApplied,
                                        std::shared_ptr<const Adapter> adapter = nullptr);

}  // namespace carrel::model
