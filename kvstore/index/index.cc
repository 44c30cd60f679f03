#include "kvstore/index/index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/index_type.h"

namespace carrel::kvstore {

#define CARREL_INDEX_KIND(Name, folder) const IndexType& Name##IndexType();
#include "kvstore/index/index_kinds.def"
#undef CARREL_INDEX_KIND

const IndexType* FindIndexType(IndexKind kind) {
  switch (kind) {
#define CARREL_INDEX_KIND(Name, folder) \
  case IndexKind::k##Name:              \
    return &Name##IndexType();
#include "kvstore/index/index_kinds.def"
#undef CARREL_INDEX_KIND
  }
  return nullptr;
}

const IndexType& IndexTypeOf(IndexKind kind) {
  const IndexType* const type = FindIndexType(kind);
  CARREL_CHECK(type != nullptr);
  return *type;
}

absl::Status CheckIndexField(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("index: ", field, "=", value, ", must be ", low, " .. ", high));
}

absl::StatusOr<IndexKind> ParseIndexKind(absl::string_view name) {
  std::string known;
  for (const IndexKind kind : kAllIndexKinds) {
    if (name == IndexKindName(kind)) return kind;
    absl::StrAppend(&known, known.empty() ? "" : ", ", IndexKindName(kind));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index kind \"", name, "\" is unknown, must be one of ", known));
}

absl::string_view IndexKindName(IndexKind kind) {
  const IndexType* const type = FindIndexType(kind);
  return type == nullptr ? "unknown" : type->name();
}

absl::Status ValidateIndexParams(const IndexParams& params) {
  RETURN_IF_ERROR(CheckIndexField("effort", params.effort, 0, kMaxEffort));
  const IndexType* const type = FindIndexType(params.kind);
  if (type != nullptr) return type->Validate(params);
  return absl::InvalidArgumentError(
      absl::StrCat("index: kind ", static_cast<int>(params.kind), " is unknown"));
}

absl::Status CheckIndexBuild(const IndexParams& params) {
  RETURN_IF_ERROR(ValidateIndexParams(params));
  return IndexTypeOf(params.kind).CheckBuild(params);
}

uint32_t SearchScratch::NextWalk(int64_t rows) {
  if (visited.size() < static_cast<size_t>(rows)) visited.resize(static_cast<size_t>(rows), 0);
  if (++walk == 0) {  // wrapped: old marks would look new
    std::fill(visited.begin(), visited.end(), 0);
    walk = 1;
  }
  return walk;
}

absl::StatusOr<std::string> BuildIndex(const IndexParams& params, const Rows& keys,
                                       const SampledQueries* queries, Accelerator* accelerator) {
  RETURN_IF_ERROR(CheckIndexBuild(params));
  return IndexTypeOf(params.kind).Build(params, keys, queries, accelerator);
}

absl::StatusOr<std::unique_ptr<Index>> OpenIndex(const IndexParams& params, Blob blob, Rows keys) {
  RETURN_IF_ERROR(ValidateIndexParams(params));
  return IndexTypeOf(params.kind).Open(params, std::move(blob), std::move(keys));
}

int64_t EffortOf(const IndexParams& params, int64_t top_k, int64_t rows) {
  return params.effort > 0 ? params.effort
                           : IndexTypeOf(params.kind).DefaultEffort(params, top_k, rows);
}

}  // namespace carrel::kvstore
