#include "kvstore/index/hnsw/hnsw.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/links/link_index.h"

namespace carrel::kvstore {

absl::StatusOr<std::unique_ptr<Index>> OpenHnsw(const IndexParams& params, const Blob& blob,
                                                Rows keys) {
  ASSIGN_OR_RETURN(std::string bytes, blob.Read());
  ASSIGN_OR_RETURN(HnswLinks links, HnswLinks::Open(std::move(bytes)));
  const HnswLinks::Header& header = links.header();
  if (header.m != params.m || header.ef_construction != params.ef_construction) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hnsw blob was built with m=", header.m, " ef_construction=", header.ef_construction,
        ", not m=", params.m, " ef_construction=", params.ef_construction));
  }
  return OpenLinkIndex(params, std::move(links), std::move(keys));
}

}  // namespace carrel::kvstore
