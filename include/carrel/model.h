// What:      a language model for prefill and reading: weights (mapped, not copied), tokenizer, and
//            the threads that run it.
// Errors:    NotFound, InvalidArgument, Unimplemented what is wrong with the files (names them);
//            DataLoss weights that changed on disk.
// Ownership: readers and prefills keep the model alive.
// Threads:   any. Readers of one model share its weights and threads.
// Example:   const auto model = carrel::Model::Load("models/demo");               // examples/01_prefill.cc
//            const auto tokens = (*model)->EncodeDocument(text);
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "carrel/export.h"
#include "carrel/status.h"

namespace carrel {
inline namespace api {

using Token = int32_t;  // an entry of the vocabulary

struct ModelOptions {
  std::string adapter;  // folder of a LoRA adapter in PEFT's form; empty: none
  int threads = 0;      // 0: one per core; at most 1024
};

struct ModelShape {
  int32_t layers = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_tokens = 0;  // that it was trained for
};

class CARREL_API Model {
 public:
  // path: folder of a Hugging Face checkpoint, or a GGUF file. Cost: hashes the weights once
  // (about 1.5 GB/s per core), later only looks whether the files are the same.
  static Result<std::shared_ptr<Model>> Load(const std::string& path,
                                             const ModelOptions& options = {});
  virtual ~Model() = default;

  virtual ModelShape shape() const = 0;
  // The tokens of a document: the one that documents begin with comes first, where the model has
  // one. FailedPrecondition: the model came without a tokenizer.
  virtual Result<std::vector<Token>> EncodeDocument(std::string_view text) const = 0;
  // Of what follows a document.
  virtual Result<std::vector<Token>> EncodePrompt(std::string_view text) const = 0;
  // Byte-exact; tokens that steer (end of text, say) are left out.
  virtual Result<std::string> Decode(std::span<const Token> tokens) const = 0;
};

}  // namespace api
}  // namespace carrel
