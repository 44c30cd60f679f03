// What:   the contexts of a store as a service knows them, by name: what is shown of each, whether this model answers
//         from it, when it was used last, and which of them a prompt may begin with.
// Usable: as opening has it (library::MayOpen).
// Errors: of ReadContext: those of the store. A context that is damaged, or gone meanwhile, is known by its name alone.
// Ownership: keeps the prefixes, which others share.
// Threads: KnownContexts: one at a time. ReadContext: any.
// Cost:   of ReadContext: its manifest and its tokens, which are not kept.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/config.h"
#include "kvstore/service/context_client.h"
#include "library/store_access.h"
#include "model/checkpoint.h"
#include "serving/document.h"
#include "serving/prefix_cache.h"

namespace carrel::v1 {
class ListResponse_Summary;
}

namespace carrel::serving {

struct KnownContext {
  Document document;
  std::string digest;  // of its tokens
  absl::Time used;
};

class KnownContexts {
 public:
  using ByName = std::map<std::string, KnownContext>;

  // prefixes: where prompts look for these documents; outlives this.
  explicit KnownContexts(PrefixCache* prefixes) : prefixes_(*prefixes) {}

  const ByName& all() const { return contexts_; }
  const KnownContext* Find(const std::string& name) const;  // null: there is none
  // What the store holds now; of those that were known the times of use stay.
  void Replace(ByName contexts);
  void Remove(const std::string& name);
  void Use(const std::string& name);

  // Names and content ids of those that the prompt may begin with, the longest first.
  std::vector<std::pair<std::string, std::string>> Candidates(
      absl::Span<const TokenId> prompt) const;

 private:
  ByName contexts_;
  PrefixCache& prefixes_;
};

// What one context of a store is; its tokens, if a prompt may be answered from it.
struct ReadContext {
  KnownContext known;
  std::optional<std::vector<TokenId>> tokens;

  // retrieval, derived_weights: how contexts are opened here.
  static absl::StatusOr<ReadContext> From(const v1::ListResponse_Summary& summary,
                                          kvstore::ContextClient& client,
                                          library::StoreAccess& store,
                                          const model::Checkpoint& checkpoint,
                                          const decoder::RetrievalConfig& retrieval,
                                          bool derived_weights);
};

}  // namespace carrel::serving
