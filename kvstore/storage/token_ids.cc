#include "kvstore/storage/token_ids.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/ids.h"
#include "common/status.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

absl::StatusOr<std::string> ReadTokenIds(const StoredContext& context, int64_t begin, int64_t end) {
  const int64_t from = begin * int64_t{sizeof(TokenId)}, to = end * int64_t{sizeof(TokenId)};
  ASSIGN_OR_RETURN(const uint32_t segments, context.SegmentCount(-1, Kind::kTokenIds, KvHead(0)));
  std::string bytes;
  int64_t at = 0;  // of the segment, in the document
  for (uint32_t i = 0; i < segments && at < to; ++i) {
    ASSIGN_OR_RETURN(const auto segment, context.Segment(-1, Kind::kTokenIds, KvHead(0), i));
    const absl::string_view payload = segment->payload();
    const auto size = static_cast<int64_t>(payload.size());
    const int64_t first = std::clamp<int64_t>(from - at, 0, size);
    const int64_t last = std::clamp<int64_t>(to - at, 0, size);
    at += size;
    if (first >= last) continue;
    RETURN_IF_ERROR(segment->Verify(first, last));
    absl::StrAppend(&bytes,
                    payload.substr(static_cast<size_t>(first), static_cast<size_t>(last - first)));
  }
  if (static_cast<int64_t>(bytes.size()) != to - from) {
    const v1::Manifest& manifest = context.manifest();
    return absl::DataLossError(absl::StrCat("context ", manifest.name(), ": ", at,
                                            " bytes of token ids, its manifest has ",
                                            manifest.tokens(), " tokens"));
  }
  return bytes;
}

}  // namespace carrel::kvstore
