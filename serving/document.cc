#include "serving/document.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/checksum.h"
#include "common/metrics.h"
#include "model/config.h"
#include "serving/status_details.h"

namespace carrel::serving {

absl::Status CheckDocumentLength(const model::ModelConfig& config,
                                 const std::vector<TokenId>& tokens) {
  const int64_t most = config.MaxTokens();
  if (tokens.empty()) return absl::InvalidArgumentError("text: the document is empty");
  if (static_cast<int64_t>(tokens.size()) < most) return absl::OkStatus();
  return WithCode(WithParam(absl::InvalidArgumentError(absl::StrCat(
                                "text: the document has ", tokens.size(),
                                " tokens: must be fewer than the model's ", most, " (",
                                config.MaxTokensField(), "), which question and answer are among")),
                            "text"),
                  kContextLengthExceeded);
}

absl::Status AnotherDocuments(const std::string& name) {
  return WithParam(
      absl::AlreadyExistsError(absl::StrCat(
          "name=", name, " is another document's: delete that one, or choose another")),
      "name");
}

int64_t ExpectedBytes(const model::ModelConfig& config, int64_t tokens) {
  const AttentionShape& shape = config.shape;
  return tokens * 4 * shape.layers * shape.kv_heads * shape.head_dim;
}

std::string DigestOf(const std::vector<TokenId>& tokens) {
  return Sha256Hex(absl::string_view(reinterpret_cast<const char*>(tokens.data()),
                                     tokens.size() * sizeof(TokenId)));
}

void CountDocument(absl::string_view end) {
  CounterOf("carrel_api_documents_total", "Documents that were taken in, by how that ended.",
            {{"end", std::string(end)}})
      .Add();
}

absl::Status BeingRead(const Document& document) {
  const bool queued = document.state == DocumentState::kQueued;
  const std::string how = queued
                              ? "waits to be read"
                              : absl::StrFormat("is being read, %.0f%%", 100 * document.progress);
  return WithCode(
      WithRetryAfter(absl::UnavailableError(absl::StrCat(
                         "context \"", document.name, "\" ", how,
                         ": come again, or say \"wait\": SECONDS, at most 600, to wait for it")),
                     absl::Seconds(queued ? 10 : 3)),
      "context_not_ready");
}

}  // namespace carrel::serving
