#include "kvstore/index/index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/code.h"
#include "kvstore/index/flat.h"
#include "kvstore/index/graph.h"
#include "kvstore/index/hnsw.h"
#include "kvstore/index/hnsw_links.h"
#include "kvstore/index/int8.h"
#include "kvstore/index/ivf.h"

namespace carrel::kvstore {
namespace {

absl::Status CheckField(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("index: ", field, "=", value, ", must be ", low, " .. ", high));
}

}  // namespace

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
  switch (kind) {
    case IndexKind::kFlat:
      return "flat";
    case IndexKind::kHnsw:
      return "hnsw";
    case IndexKind::kCode:
      return "code";
    case IndexKind::kIvf:
      return "ivf";
    case IndexKind::kGraph:
      return "graph";
    case IndexKind::kInt8:
      return "int8";
  }
  return "unknown";
}

absl::StatusOr<CodeTraining> ParseCodeTraining(absl::string_view name) {
  for (const auto training : {CodeTraining::kOff, CodeTraining::kStaged, CodeTraining::kHata}) {
    if (name == CodeTrainingName(training)) return training;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index: code_training=\"", name, "\", must be off, staged or hata"));
}

absl::string_view CodeTrainingName(CodeTraining training) {
  switch (training) {
    case CodeTraining::kOff:
      return "off";
    case CodeTraining::kStaged:
      return "staged";
    case CodeTraining::kHata:
      return "hata";
  }
  return "unknown";
}

absl::StatusOr<CodeScan> ParseCodeScan(absl::string_view name) {
  for (const auto scan : {CodeScan::kAsymmetric, CodeScan::kSymmetric}) {
    if (name == CodeScanName(scan)) return scan;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index: code_scan=\"", name, "\", must be asymmetric or symmetric"));
}

absl::string_view CodeScanName(CodeScan scan) {
  switch (scan) {
    case CodeScan::kAsymmetric:
      return "asymmetric";
    case CodeScan::kSymmetric:
      return "symmetric";
  }
  return "unknown";
}

absl::Status ValidateIndexParams(const IndexParams& params) {
  RETURN_IF_ERROR(CheckField("effort", params.effort, 0, kMaxEffort));
  switch (params.kind) {
    case IndexKind::kFlat:
    case IndexKind::kInt8:
      return absl::OkStatus();
    case IndexKind::kHnsw:
      RETURN_IF_ERROR(CheckField("m", params.m, 4, kMaxHnswM));
      return CheckField("ef_construction", params.ef_construction, params.m, 4096);
    case IndexKind::kCode:
      RETURN_IF_ERROR(CheckField("code_training", static_cast<int>(params.code_training), 0,
                                 static_cast<int>(CodeTraining::kHata)));
      RETURN_IF_ERROR(CheckField("code_scan", static_cast<int>(params.code_scan), 0,
                                 static_cast<int>(CodeScan::kSymmetric)));
      if (params.code_bits == 64 || params.code_bits == 128 || params.code_bits == 256) {
        return absl::OkStatus();
      }
      return absl::InvalidArgumentError(
          absl::StrCat("index: code_bits=", params.code_bits, ", must be 64, 128 or 256"));
    case IndexKind::kIvf:
      return CheckField("ivf_lists", params.ivf_lists, 0, 65536);
    case IndexKind::kGraph:
      return CheckField("m", params.m, 4, kMaxHnswM);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index: kind ", static_cast<int>(params.kind), " is unknown"));
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
  RETURN_IF_ERROR(ValidateIndexParams(params));
  switch (params.kind) {
    case IndexKind::kFlat:
      return std::string();
    case IndexKind::kHnsw:
      return BuildHnsw(params, keys);
    case IndexKind::kCode:
      return BuildCode(params, keys, queries, accelerator);
    case IndexKind::kIvf:
      return BuildIvf(params, keys, queries, accelerator);
    case IndexKind::kGraph:
      return BuildGraph(params, keys, queries, accelerator);
    case IndexKind::kInt8:
      return BuildInt8(params, keys);
  }
  return absl::InternalError("unreachable");
}

absl::StatusOr<std::unique_ptr<Index>> OpenIndex(const IndexParams& params, Blob blob, Rows keys) {
  RETURN_IF_ERROR(ValidateIndexParams(params));
  switch (params.kind) {
    case IndexKind::kFlat:
      if (blob.empty()) return MakeFlatIndex(std::move(keys));
      return absl::InvalidArgumentError(
          absl::StrCat("index: flat has no blob, ", blob.size(), " bytes were given"));
    case IndexKind::kHnsw:
      return OpenHnsw(params, blob, std::move(keys));
    case IndexKind::kCode:
      return OpenCode(params, std::move(blob), std::move(keys));
    case IndexKind::kIvf:
      return OpenIvf(params, blob, std::move(keys));
    case IndexKind::kGraph:
      return OpenGraph(params, blob, std::move(keys));
    case IndexKind::kInt8:
      return OpenInt8(params, std::move(blob), std::move(keys));
  }
  return absl::InternalError("unreachable");
}

int64_t DefaultEffort(const IndexParams& params, int64_t top_k, int64_t rows) {
  switch (params.kind) {
    case IndexKind::kFlat:
      return 0;
    case IndexKind::kHnsw:
      return std::max<int64_t>(128, 2 * top_k);
    case IndexKind::kGraph:
      return std::max<int64_t>(128, 3 * top_k);
    case IndexKind::kIvf:
      return std::max<int64_t>(64, IvfLists(params.ivf_lists, rows) / 4);
    case IndexKind::kCode:
      return std::max<int64_t>(512, 4 * top_k);
    case IndexKind::kInt8:
      return std::max<int64_t>(64, 2 * top_k);
  }
  return 0;
}

int64_t IndexBytesPerKey(const IndexParams& params, int64_t head_dim) {
  switch (params.kind) {
    case IndexKind::kFlat:
      return 0;
    case IndexKind::kHnsw:
      return int64_t{4} * 3 * params.m;
    case IndexKind::kCode:
      return params.code_bits / 8 + 1;
    case IndexKind::kIvf:
      return 12;
    case IndexKind::kGraph:
      return int64_t{4} * 2 * params.m + 1;
    case IndexKind::kInt8:
      return head_dim + 4;
  }
  return 0;
}

int64_t IndexHeapBytes(IndexKind kind, int64_t blob_bytes) {
  if (kind == IndexKind::kInt8) return std::min(blob_bytes, kMaxInt8HeapBytes);
  // What a code index keeps beside its mapped blob: see kMaxCodeHeapBytes.
  return kind == IndexKind::kCode ? std::min(blob_bytes, kMaxCodeHeapBytes) : blob_bytes;
}

}  // namespace carrel::kvstore
