#include "model/tokenizer/tokenizer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status.h"
#include "model/tokenizer/bpe_tokenizer.h"
#include "model/tokenizer/gguf_tokenizer.h"
#include "model/tokenizer/sentencepiece_tokenizer.h"
#include "model/tokenizer/tokenizer_files.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {

absl::StatusOr<std::string> Tokenizer::Decode(absl::Span<const TokenId> ids,
                                              bool skip_special) const {
  std::string text;
  DecodeState state;
  for (const TokenId id : ids) RETURN_IF_ERROR(DecodeNext(id, skip_special, &state, &text));
  return text;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model_dir) {
  if (IsGgufPath(model_dir)) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const Gguf> gguf, Gguf::Open(model_dir));
    return GgufTokenizer(*gguf);
  }
  const std::string json_path = absl::StrCat(model_dir, "/tokenizer.json");
  const std::string model_path = absl::StrCat(model_dir, "/tokenizer.model");
  const absl::StatusOr<std::string> json_bytes = ReadFile(json_path);
  if (!json_bytes.ok() && !absl::IsNotFound(json_bytes.status())) return json_bytes.status();
  if (json_bytes.ok()) {
    ASSIGN_OR_RETURN(const TokenizerJson json, ParseTokenizerJson(json_path, *json_bytes));
    if (json.other_kind.empty()) {
      ASSIGN_OR_RETURN(const TokenizerConfig config, ReadTokenizerConfig(model_dir));
      return CreateBpeTokenizer(json_path, *json_bytes, json, config);
    }
  }
  const absl::StatusOr<std::string> model_bytes = ReadFile(model_path);
  if (absl::IsNotFound(model_bytes.status())) {
    if (!json_bytes.ok()) {
      return absl::NotFoundError(
          absl::StrCat(model_dir, ": neither tokenizer.json nor tokenizer.model"));
    }
    ASSIGN_OR_RETURN(const TokenizerJson json,
                     ParseTokenizerJson(json_path, *json_bytes, /*characters=*/true));
    if (!json.other_kind.empty()) {
      return absl::UnimplementedError(
          absl::StrCat(json_path, ": ", json.other_kind,
                       " is not supported, and there is no tokenizer.model beside it"));
    }
    ASSIGN_OR_RETURN(const TokenizerConfig config, ReadTokenizerConfig(model_dir));
    return CreateBpeTokenizer(json_path, *json_bytes, json, config);
  }
  RETURN_IF_ERROR(model_bytes.status());
  ASSIGN_OR_RETURN(const TokenizerConfig config, ReadTokenizerConfig(model_dir));
  return CreateSentencePieceTokenizer(model_path, *model_bytes, config);
}

absl::StatusOr<std::string> StreamDecoder::Push(TokenId id) {
  RETURN_IF_ERROR(tokenizer_->DecodeNext(id, skip_special_, &state_, &pending_));
  const size_t complete = CompleteUtf8Size(pending_);
  std::string text = pending_.substr(0, complete);
  pending_.erase(0, complete);
  return text;
}

absl::StatusOr<std::string> StreamDecoder::Finish() {
  state_ = {};
  return std::exchange(pending_, {});
}

}  // namespace carrel::model
