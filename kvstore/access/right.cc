#include "kvstore/access/right.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace carrel::kvstore {
namespace {

constexpr absl::string_view kNames[] = {"list", "open", "import", "delete", "admin"};

constexpr RpcRight kTable[] = {
    {"ContextService.List", Right::kList},      {"ContextService.Get", Right::kList},
    {"ContextService.Tokens", Right::kOpen},    {"ContextService.Statistics", Right::kList},
    {"ContextService.Verify", Right::kAdmin},   {"ContextService.Export", Right::kOpen},
    {"ContextService.Import", Right::kImport},  {"ContextService.Delete", Right::kDelete},
    {"ContextService.Warm", Right::kOpen},      {"ContextService.Locate", Right::kOpen},
    {"RetrievalService.Session", Right::kOpen},
};

// {} stands for a name.
constexpr RpcRight kHttpTable[] = {
    {"GET /metrics", Right::kList},
    {"GET /v1/models", Right::kList},
    {"GET /v1/models/{}", Right::kList},
    {"POST /v1/completions", Right::kOpen},
    {"POST /v1/chat/completions", Right::kOpen},
    {"GET /v1/contexts", Right::kList},
    {"POST /v1/contexts", Right::kImport},
    {"GET /v1/contexts/{}", Right::kList},
    {"DELETE /v1/contexts/{}", Right::kDelete},
    {"GET /v1/contexts/{}/events", Right::kList},
    {"GET /v1/contexts/{}/text", Right::kOpen},
    {"POST /v1/contexts/{}/warm", Right::kOpen},
};

}  // namespace

absl::string_view RightName(Right right) { return kNames[static_cast<size_t>(right)]; }

absl::StatusOr<Right> ParseRight(absl::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<Right>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", name.substr(0, 64), "\" is no right, those are ", absl::StrJoin(kNames, ", ")));
}

std::string RightNames(Rights rights) {
  std::vector<absl::string_view> names;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (rights.Has(static_cast<Right>(i))) names.push_back(kNames[i]);
  }
  return names.empty() ? "none" : absl::StrJoin(names, " ");
}

absl::Span<const RpcRight> RpcRights() { return kTable; }
absl::Span<const RpcRight> HttpRights() { return kHttpTable; }

absl::StatusOr<Right> RightOf(absl::string_view rpc) {
  for (const absl::Span<const RpcRight> table : {RpcRights(), HttpRights()}) {
    for (const RpcRight& row : table) {
      if (row.rpc == rpc) return row.right;
    }
  }
  return absl::PermissionDeniedError(absl::StrCat("no right is laid down for ", rpc));
}

}  // namespace carrel::kvstore
