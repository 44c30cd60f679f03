// What:   the weights of a GGUF file, in the order of a Hugging Face checkpoint.
// Math:   matrices stay as they are, mapped: f32, f16, bf16, and quantised ones, which products
//         read (kernels/layer/quantized_linear). With kWiden quantised ones are widened and rounded to
//         bf16 here. Rows of Q and K that alternate between the halves of a head are put in order,
//         by a copy.
// Edge:   a bias beside blocks is f32. Else it has its matrix's type: rounded to it where that
//         changes no bit of it; where it would, the matrix becomes f32.
// Errors: InvalidArgument a tensor that is missing, has another shape than the config implies, or
//         is not part of the model (names it as the file does); ResourceExhausted memory for what
//         is copied or widened.
// Cost:   of what is widened: 2 bytes of memory per weight, and some 0.3 ns of a core; the pool
//         (may be null) shares it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "model/cpu_backend.h"
#include "model/gguf.h"

namespace carrel::model {

enum class GgufBlocks : uint8_t { kKeep = 0, kWiden = 1 };

absl::StatusOr<std::shared_ptr<const Weights>> LoadGgufWeights(
    std::shared_ptr<const Gguf> gguf, const ModelConfig& config, ThreadPool* pool,
    GgufBlocks blocks = GgufBlocks::kKeep);

}  // namespace carrel::model
