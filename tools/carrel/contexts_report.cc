#include "tools/carrel/contexts_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/manifest_report.h"

namespace carrel::tools {

nlohmann::json ContextsJson(const v1::ListResponse& list) {
  nlohmann::json json = JsonOf(list);
  for (nlohmann::json& context : json["contexts"]) Rename(context, "index_kind", "index");
  return json;
}

std::string ContextsTable(const v1::ListResponse& list) {
  if (list.contexts().empty()) {
    return list.unreadable().empty() ? "no contexts\n" : "no contexts that can be read\n";
  }
  std::string table =
      absl::StrFormat("%-24s %10s %6s %8s %8s %-6s %10s  %-19s  %s\n", "NAME", "TOKENS", "LAYERS",
                      "KV HEADS", "HEAD DIM", "INDEX", "SIZE", "CREATED", "CONTENT ID");
  for (const v1::ListResponse::Summary& context : list.contexts()) {
    if (context.elsewhere()) {
      absl::StrAppendFormat(&table, "%-24s %10d %6s %8s %8s %-6s %10s  %-19s  %s\n", context.name(),
                            context.tokens(), "-", "-", "-", "-", FormatBytes(context.bytes()),
                            "in the bucket alone", context.content_id().substr(0, 12));
      continue;
    }
    absl::StrAppendFormat(
        &table, "%-24s %10d %6u %8u %8u %-6s %10s  %-19s  %s\n", context.name(), context.tokens(),
        context.layers(), context.kv_heads(), context.head_dim(), context.index_kind(),
        FormatBytes(context.bytes()), FormatTime(context.created_unix_s()),
        context.content_id().empty() ? "unbound" : context.content_id().substr(0, 12));
  }
  return table;
}

std::string UnfinishedPrefills(const v1::ListResponse& list) {
  std::string lines;
  for (const v1::ListResponse::Unfinished& prefill : list.unfinished()) {
    absl::StrAppend(&lines, "unfinished: ", prefill.name(), ", ", FormatBytes(prefill.bytes()),
                    ", ",
                    prefill.running()
                        ? "being computed"
                        : absl::StrCat("last written ", FormatTime(prefill.touched_unix_s()),
                                       ": the same prefill goes on with it, carrel rm removes it"),
                    "\n");
  }
  return lines;
}

std::string UnreadableContexts(const v1::ListResponse& list) {
  std::string lines;
  for (const std::string& why : list.unreadable()) {
    absl::StrAppend(&lines, "cannot be read: ", why, "\n");
  }
  return lines;
}

}  // namespace carrel::tools
