#include "carrel/model.h"

#include "carrel/version.h"
#include "common/status.h"
#include "library/handles.h"
#include "library/status.h"

namespace carrel {
inline namespace api {

#define CARREL_TEXT_OF(x) #x
#define CARREL_TEXT(x) CARREL_TEXT_OF(x)
const char* Version() {
  return CARREL_TEXT(CARREL_VERSION_MAJOR) "." CARREL_TEXT(CARREL_VERSION_MINOR) "." CARREL_TEXT(
      CARREL_VERSION_PATCH);
}

Result<std::shared_ptr<Model>> Model::Load(const std::string& path, const ModelOptions& options) {
  absl::StatusOr<std::shared_ptr<library::LoadedModel>> loaded =
      library::LoadedModel::Load(path, options.adapter, options.threads);
  if (!loaded.ok()) return library::ToPublic(loaded.status());
  return std::shared_ptr<Model>(std::make_shared<library::ModelHandle>(*std::move(loaded)));
}

}  // namespace api

namespace library {

ModelShape ModelHandle::shape() const {
  const model::ModelConfig& config = loaded_->checkpoint().config;
  return {.layers = config.shape.layers,
          .q_heads = config.shape.q_heads,
          .kv_heads = config.shape.kv_heads,
          .head_dim = config.shape.head_dim,
          .vocab_size = config.vocab_size,
          .max_tokens = config.MaxTokens()};
}

Result<std::vector<Token>> ModelHandle::EncodeDocument(std::string_view text) const {
  return ToPublic(loaded_->checkpoint().EncodeDocument({text.data(), text.size()}));
}

Result<std::vector<Token>> ModelHandle::EncodePrompt(std::string_view text) const {
  return ToPublic(loaded_->checkpoint().EncodePrompt({text.data(), text.size()}));
}

Result<std::string> ModelHandle::Decode(std::span<const Token> tokens) const {
  const model::Checkpoint& checkpoint = loaded_->checkpoint();
  if (checkpoint.tokenizer == nullptr) {
    return Status(StatusCode::kFailedPrecondition, "the model came without a tokenizer");
  }
  return ToPublic(checkpoint.tokenizer->Decode(absl::MakeConstSpan(tokens.data(), tokens.size()),
                                               /*skip_special=*/true));
}

}  // namespace library
}  // namespace carrel
