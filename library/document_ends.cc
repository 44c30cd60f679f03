#include "library/document_ends.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "model/tokenizer/seam.h"

namespace carrel::library {
namespace {

absl::StatusOr<DocumentEnds> Read(const std::string& context, const std::string& content_id,
                                  StoreAccess& store) {
  DocumentEnds ends;
  absl::StatusOr<std::vector<TokenId>> tokens = store.DocumentTokens(context, content_id);
  if (absl::IsUnimplemented(tokens.status()) || absl::IsPermissionDenied(tokens.status())) {
    return ends;
  }
  RETURN_IF_ERROR(tokens.status());
  ends.known = true;
  ends.tokens = static_cast<int64_t>(tokens->size());
  const auto last = static_cast<std::ptrdiff_t>(std::min(tokens->size(), model::kSeamTail));
  ends.last.assign(tokens->end() - last, tokens->end());
  tokens->resize(std::min(tokens->size(), DocumentEnds::kFirst));
  ends.first = *std::move(tokens);
  return ends;
}

}  // namespace

absl::StatusOr<DocumentEnds> DocumentEndsCache::Of(const std::string& context,
                                                   const std::string& content_id,
                                                   StoreAccess& store) {
  {
    absl::MutexLock lock(&mu_);
    const auto kept = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& one) {
      return one.content_id == content_id && !content_id.empty();
    });
    if (kept != kept_.end()) {
      kept_.splice(kept_.begin(), kept_, kept);
      return kept_.front().ends;
    }
  }
  ASSIGN_OR_RETURN(DocumentEnds ends, Read(context, content_id, store));
  absl::MutexLock lock(&mu_);
  kept_.push_front({content_id, ends});
  if (kept_.size() > kMost) kept_.pop_back();
  return ends;
}

}  // namespace carrel::library
