// What:   the model that a GGUF file's metadata describe, as config.json would.
// Source: the keys that llama.cpp's converters write for the architectures llama (Mistral is one),
//         qwen2, qwen3, qwen3moe and gemma3. Biases are what the first layer has; embeddings are tied where there is
//         no output.weight. rope_freqs.weight is what Llama 3's rope scaling comes to: the
//         parameters are found again, and must give the tensor back.
// Errors: InvalidArgument a key that is missing, of another type or out of range, or tensors that
//         contradict it; Unimplemented, naming it, an architecture, rope scaling, experts, or a
//         key of the architecture that is not understood (field_rules.h).
#pragma once

#include "absl/status/statusor.h"
#include "model/config.h"
#include "model/gguf.h"

namespace carrel::model {

absl::StatusOr<ModelConfig> GgufModelConfig(const Gguf& gguf);

// Whether the rows of Q and K alternate between the halves of a head, as the architecture llama
// stores them: row 2 i + j of a head is its row j head_dim / 2 + i in a Hugging Face checkpoint.
bool GgufHasAlternatingHalves(const ModelConfig& config);

inline constexpr char kGgufRopeFactors[] = "rope_freqs.weight";

}  // namespace carrel::model
