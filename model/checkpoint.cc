#include "model/checkpoint.h"

#include "common/checksum.h"
#include "common/status.h"
#include "model/fingerprint.h"
#include "model/special_tokens.h"
#include "model/weights.h"

namespace carrel::model {

namespace {

// An adapter is small: its files are hashed as they are.
std::string FilesSha256(const ModelFiles& files) {
  std::string digests;
  for (const auto& file : files) digests += Sha256Hex(file->bytes());
  return digests;
}

std::shared_ptr<const ModelFilesWatch> WatchFiles(const Checkpoint& checkpoint,
                                                  const std::string& weights_sha256) {
  ModelFiles files = checkpoint.weights->files(), added;
  if (checkpoint.adapter != nullptr) added = checkpoint.adapter->files();
  files.insert(files.end(), added.begin(), added.end());
  auto digest = [weights = checkpoint.weights, added] {
    return WeightsSha256(*weights, nullptr) + FilesSha256(added);
  };
  return std::make_shared<const ModelFilesWatch>(std::move(files), std::move(digest),
                                                 weights_sha256 + FilesSha256(added));
}

}  // namespace

absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& model_dir, ThreadPool* pool,
                                          const std::string& adapter_dir,
                                          const DigestCache* cache) {
  Checkpoint checkpoint;
  RETURN_IF_ERROR(CheckNoOtherAdapter(model_dir, adapter_dir));
  ASSIGN_OR_RETURN(checkpoint.config, LoadModelConfig(model_dir));
  ASSIGN_OR_RETURN(checkpoint.generation_defaults, LoadGenerationDefaults(model_dir));
  ASSIGN_OR_RETURN(checkpoint.weights, LoadWeights(model_dir, checkpoint.config, pool));
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(model_dir);
  std::string tokenizer_sha256 = "none";
  if (tokenizer.ok()) {
    (*tokenizer)->DropTokensFrom(checkpoint.config.vocab_size);
    checkpoint.tokenizer = *std::move(tokenizer);
    tokenizer_sha256 = checkpoint.tokenizer->sha256();
    if (checkpoint.tokenizer->vocab_size() > checkpoint.config.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer of ", model_dir, " does not fit its model: it has ids up to ",
                       checkpoint.tokenizer->vocab_size() - 1, ", the model's vocab_size is ",
                       checkpoint.config.vocab_size));
    }
    ASSIGN_OR_RETURN(SpecialTexts texts,
                     ResolveSpecialTokens(model_dir, *checkpoint.tokenizer, checkpoint.config));
    checkpoint.bos_text = std::move(texts.bos);
    checkpoint.eos_text = std::move(texts.eos);
  } else if (!absl::IsNotFound(tokenizer.status())) {
    return tokenizer.status();
  }
  std::string adapter_sha256;
  if (!adapter_dir.empty()) {
    RETURN_IF_ERROR(ReadAdapterConfig(adapter_dir, checkpoint.config));
    ASSIGN_OR_RETURN(checkpoint.adapter, Adapter::Load(adapter_dir, checkpoint.config));
    adapter_sha256 = checkpoint.adapter->sha256();
  }
  const std::string weights_sha256 = WeightsSha256(*checkpoint.weights, pool, cache);
  checkpoint.files = WatchFiles(checkpoint, weights_sha256);
  checkpoint.fingerprint =
      ModelFingerprint(checkpoint.config, weights_sha256, tokenizer_sha256, adapter_sha256);
  RETURN_IF_ERROR(checkpoint.CheckUnchanged());
  return checkpoint;
}

absl::Status Checkpoint::CheckUnchanged() const {
  return files == nullptr ? absl::OkStatus() : files->Check();
}

absl::StatusOr<std::vector<TokenId>> Checkpoint::EncodePrompt(absl::string_view text,
                                                              Tokenizer::Dropped* dropped) const {
  if (tokenizer == nullptr) {
    return absl::FailedPreconditionError(
        "the model folder has no tokenizer (tokenizer.json or tokenizer.model): give token ids "
        "instead of text");
  }
  return tokenizer->Encode(text, dropped);
}

absl::StatusOr<std::vector<TokenId>> Checkpoint::EncodeDocument(absl::string_view text,
                                                                Tokenizer::Dropped* dropped) const {
  ASSIGN_OR_RETURN(std::vector<TokenId> ids, EncodePrompt(text, dropped));
  const TokenId bos = tokenizer->bos_token_id();
  if (!ids.empty() && bos >= 0 && ids.front() != bos) ids.insert(ids.begin(), bos);
  return ids;
}

absl::Status ValidateTokenIds(absl::Span<const TokenId> ids, const ModelConfig& config) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= config.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token id ", ids[i], " at index ", i,
                                                     " is outside the vocabulary [0, ",
                                                     config.vocab_size, ")"));
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel::model
