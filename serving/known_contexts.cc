#include "serving/known_contexts.h"

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "library/open_decoder.h"

namespace carrel::serving {

const KnownContext* KnownContexts::Find(const std::string& name) const {
  const auto found = contexts_.find(name);
  return found == contexts_.end() ? nullptr : &found->second;
}

void KnownContexts::Replace(ByName contexts) {
  for (const auto& [name, entry] : contexts_) {
    const auto still = contexts.find(name);
    if (still == contexts.end() || still->second.document.content_id != entry.document.content_id) {
      prefixes_.RemoveDocument(entry.document.content_id);
    } else {
      still->second.used = entry.used;
    }
  }
  contexts_ = std::move(contexts);
}

void KnownContexts::Remove(const std::string& name) {
  const auto found = contexts_.find(name);
  if (found == contexts_.end()) return;
  prefixes_.RemoveDocument(found->second.document.content_id);
  contexts_.erase(found);
}

void KnownContexts::Use(const std::string& name) {
  if (const auto found = contexts_.find(name); found != contexts_.end()) {
    found->second.used = SteadyNow();
  }
}

std::vector<std::pair<std::string, std::string>> KnownContexts::Candidates(
    absl::Span<const TokenId> prompt) const {
  std::vector<std::pair<std::string, std::string>> candidates;
  for (const std::string& content_id : prefixes_.DocumentsOf(prompt)) {
    for (const auto& [name, entry] : contexts_) {
      if (entry.document.content_id == content_id) candidates.emplace_back(name, content_id);
    }
  }
  return candidates;
}

absl::StatusOr<ReadContext> ReadContext::From(const v1::ListResponse_Summary& summary,
                                              kvstore::ContextClient& client,
                                              library::StoreAccess& store,
                                              const model::Checkpoint& checkpoint,
                                              const decoder::RetrievalConfig& retrieval,
                                              bool derived_weights) {
  ReadContext read;
  Document& document = read.known.document;
  document = {.name = summary.name(),
              .state = DocumentState::kReady,
              .progress = 1,
              .tokens = summary.tokens(),
              .bytes = summary.bytes(),
              .content_id = summary.content_id(),
              .index = summary.index_kind(),
              .created_unix_s = summary.created_unix_s()};
  read.known.used = absl::FromUnixSeconds(summary.created_unix_s());
  document.resident = !summary.elsewhere();
  if (!document.resident) return read;
  const absl::StatusOr<v1::Manifest> manifest = client.Get(summary.name());
  if (absl::IsNotFound(manifest.status())) return read;  // deleted meanwhile
  RETURN_IF_ERROR(manifest.status());
  read.known.digest = manifest->token_ids_sha256();
  document.usable = library::MayOpen(*manifest, checkpoint, retrieval, derived_weights);
  if (!document.usable || document.content_id.empty()) return read;
  absl::StatusOr<std::vector<TokenId>> tokens =
      store.DocumentTokens(document.name, document.content_id);
  if (absl::IsUnavailable(tokens.status()) || absl::IsResourceExhausted(tokens.status())) {
    return tokens.status();  // of a server: it is looked at again
  }
  // Damaged, replaced meanwhile, or not ours to read: by its name alone.
  if (tokens.ok()) read.tokens = *std::move(tokens);
  return read;
}

}  // namespace carrel::serving
