// What:   everything a model folder gives: config, weights, tokenizer, and the fingerprint that K
//         and V computed with it carry.
// Edge:   added tokens without an embedding (Gemma 3's <image_soft_token>) are none: written out in a text they
//         are text. config.eos_token_ids are all the ends of special_tokens.h.
// Errors: those of its parts; InvalidArgument if the tokenizer's vocabulary has ids that the model has no
//         embedding for (names both sizes), or the folder holds an adapter that is not asked for.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "model/adapter.h"
#include "model/config.h"
#include "model/cpu_backend.h"
#include "model/generation_defaults.h"
#include "model/model_files.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::model {

// Copies share weights, adapter and tokenizer.
struct Checkpoint {
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
  std::shared_ptr<const Adapter> adapter;                        // null: none
  std::shared_ptr<const Tokenizer> tokenizer;                    // null if the folder has none
  std::vector<std::pair<std::string, std::string>> fingerprint;  // ordered by name
  GenerationDefaults generation_defaults;                        // no part of the fingerprint
  std::string bos_text, eos_text;  // what chat templates call bos_token and eos_token; empty: none
  std::shared_ptr<const ModelFilesWatch> files;  // null: its tensors are in no files

  // After the last use of the weights that counts, and before what was computed is relied on:
  // DataLoss, naming the file, if they are not those of the fingerprint any more.
  absl::Status CheckUnchanged() const;

  // The ids of a document: BOS first, where the tokenizer has one and the text does not write it out.
  // `dropped` as of Tokenizer::Encode.
  absl::StatusOr<std::vector<TokenId>> EncodeDocument(absl::string_view text,
                                                      Tokenizer::Dropped* dropped = nullptr) const;
  absl::StatusOr<std::vector<TokenId>> EncodePrompt(absl::string_view text,
                                                    Tokenizer::Dropped* dropped = nullptr) const;
};

// Of a folder, or a GGUF file; with an adapter's folder, the model is the base with it (adapter.h).
// Cost: hashes all weights (about 1.5 GB/s per core), the pool's threads sharing the tensors; with
// a cache only once.
absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& model_dir, ThreadPool* pool,
                                          const std::string& adapter_dir = "",
                                          const DigestCache* cache = nullptr);

// Ids from elsewhere: InvalidArgument names the first one outside [0, vocab_size) and where it stands.
absl::Status ValidateTokenIds(absl::Span<const TokenId> ids, const ModelConfig& config);

}  // namespace carrel::model
