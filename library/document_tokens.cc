#include "library/document_tokens.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/storage/store.h"

namespace carrel::library {

using kvstore::Kind;

absl::StatusOr<std::vector<TokenId>> ReadDocumentTokens(const kvstore::StoredContext& context) {
  ASSIGN_OR_RETURN(const uint32_t segments, context.SegmentCount(-1, Kind::kTokenIds, KvHead(0)));
  std::string bytes;
  for (uint32_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(const auto segment, context.Segment(-1, Kind::kTokenIds, KvHead(0), i));
    const absl::string_view payload = segment->payload();
    RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(payload.size())));
    absl::StrAppend(&bytes, payload);
  }
  const v1::Manifest& manifest = context.manifest();
  if (bytes.size() != static_cast<size_t>(manifest.tokens()) * sizeof(TokenId) ||
      Sha256Hex(bytes) != manifest.token_ids_sha256()) {
    return absl::DataLossError(absl::StrCat("context \"", manifest.name(),
                                            "\": its token ids are not those of its manifest"));
  }
  std::vector<TokenId> tokens(static_cast<size_t>(manifest.tokens()));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return tokens;
}

}  // namespace carrel::library
