#include "library/document_tokens.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/token_ids.h"

namespace carrel::library {

absl::StatusOr<std::vector<TokenId>> ReadDocumentTokens(const kvstore::StoredContext& context) {
  const v1::Manifest& manifest = context.manifest();
  ASSIGN_OR_RETURN(const std::string bytes, kvstore::ReadTokenIds(context, 0, manifest.tokens()));
  if (Sha256Hex(bytes) != manifest.token_ids_sha256()) {
    return absl::DataLossError(absl::StrCat("context \"", manifest.name(),
                                            "\": its token ids are not those of its manifest"));
  }
  std::vector<TokenId> tokens(static_cast<size_t>(manifest.tokens()));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return tokens;
}

}  // namespace carrel::library
