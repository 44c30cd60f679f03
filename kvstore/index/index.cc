#include "kvstore/index/index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/flat.h"
#include "kvstore/index/hnsw.h"

namespace carrel::kvstore {
namespace {

absl::Status CheckField(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("index: ", field, "=", value, ", must be ", low, " .. ", high));
}

}  // namespace

absl::StatusOr<IndexKind> ParseIndexKind(absl::string_view name) {
  for (const IndexKind kind : {IndexKind::kFlat, IndexKind::kHnsw}) {
    if (name == IndexKindName(kind)) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index kind \"", name, "\" is unknown, must be flat or hnsw"));
}

absl::string_view IndexKindName(IndexKind kind) {
  switch (kind) {
    case IndexKind::kFlat:
      return "flat";
    case IndexKind::kHnsw:
      return "hnsw";
  }
  return "unknown";
}

absl::Status ValidateIndexParams(const IndexParams& params) {
  if (params.kind == IndexKind::kFlat) return absl::OkStatus();
  if (params.kind != IndexKind::kHnsw) {
    return absl::InvalidArgumentError(
        absl::StrCat("index: kind ", static_cast<int>(params.kind), " is unknown"));
  }
  RETURN_IF_ERROR(CheckField("m", params.m, 4, 64));
  RETURN_IF_ERROR(CheckField("ef_construction", params.ef_construction, params.m, 4096));
  return CheckField("ef_search", params.ef_search, 1, kMaxEfSearch);
}

uint32_t SearchScratch::NextWalk(int64_t rows) {
  if (visited.size() < static_cast<size_t>(rows)) visited.resize(static_cast<size_t>(rows), 0);
  if (++walk == 0) {  // wrapped: old marks would look new
    std::fill(visited.begin(), visited.end(), 0);
    walk = 1;
  }
  return walk;
}

absl::StatusOr<std::string> BuildIndex(const IndexParams& params, const Rows& keys) {
  RETURN_IF_ERROR(ValidateIndexParams(params));
  if (params.kind == IndexKind::kFlat) return std::string();
  return BuildHnsw(params, keys);
}

absl::StatusOr<std::unique_ptr<Index>> OpenIndex(const IndexParams& params, std::string blob,
                                                 Rows keys) {
  RETURN_IF_ERROR(ValidateIndexParams(params));
  if (params.kind == IndexKind::kHnsw) return OpenHnsw(params, std::move(blob), std::move(keys));
  if (!blob.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("index: flat has no blob, ", blob.size(), " bytes were given"));
  }
  return MakeFlatIndex(std::move(keys));
}

}  // namespace carrel::kvstore
