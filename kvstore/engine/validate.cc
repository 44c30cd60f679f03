#include "kvstore/engine/validate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_join.h"
#include "carrel/v1/context.pb.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

// Makes the errors of one request.
struct Complaint {
  const char* what;
  const OpenContext& context;
  Layer layer;

  template <typename... Parts>
  absl::Status operator()(const Parts&... parts) const {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": ", parts..., " (context=", context.name(), " layer=", layer.value(), ")"));
  }
};

absl::Status CheckLayer(const Complaint& refuse) {
  const int32_t layers = refuse.context.shape().layers;
  if (refuse.layer.value() >= 0 && refuse.layer.value() < layers) return absl::OkStatus();
  return refuse("layer=", refuse.layer.value(), " is outside [0, ", layers, ")");
}

absl::Status CheckSelection(const QueryRequest& r, const OpenContext& context,
                            const EngineConfig& config, const Complaint& refuse) {
  const absl::Status bounds = select::ValidateSelection(
      r.selection, {config.max_top_k, context.tokens(), context.shape().kv_heads});
  if (!bounds.ok()) return refuse(bounds.message());
  if (std::holds_alternative<select::TopK>(r.selection)) return absl::OkStatus();
  const char* const others = select::IsAll(r.selection) ? ", not all" : "";
  if (r.speculative) return refuse("speculative needs top_k", others);
  if (r.among_candidates_of != 0) return refuse("among_candidates_of needs top_k", others);
  return absl::OkStatus();
}

absl::Status CheckSpeculative(const QueryRequest& r, const Complaint& refuse) {
  if (!r.speculative) return absl::OkStatus();
  if (r.want != Want::kIds && r.want != Want::kRows) {
    return refuse("speculative wants IDS or ROWS: VALUES and ATTEND need the true queries");
  }
  if (r.among_candidates_of != 0) {
    return refuse("speculative and among_candidates_of=", r.among_candidates_of,
                  " exclude each other");
  }
  if (r.measure_mass && r.want == Want::kIds) {
    return refuse("measure_mass has no place in the reply to a speculative query for IDS");
  }
  return absl::OkStatus();
}

absl::Status CheckEstimate(const QueryRequest& r, const OpenContext& context,
                           const Complaint& refuse) {
  if (!r.estimate) return absl::OkStatus();
  if (r.want != Want::kAttend) return refuse("estimate is part of partial attention: want ATTEND");
  if (select::IsAll(r.selection)) return absl::OkStatus();  // nothing is left over
  return context.CheckSummaries();
}

absl::Status CheckHeld(const QueryRequest& r, const OpenContext& context, const Complaint& refuse) {
  if (r.held.empty()) return absl::OkStatus();
  if (r.want != Want::kRows) return refuse("held rows need want ROWS: nothing else brings rows");
  if (static_cast<int32_t>(r.held.size()) != context.shape().kv_heads) {
    return refuse("held rows of ", r.held.size(), " heads, the context has ",
                  context.shape().kv_heads);
  }
  for (size_t head = 0; head < r.held.size(); ++head) {
    Position last = -1;
    for (const Position id : r.held[head]) {
      if (id <= last || id >= context.tokens()) {
        return refuse("held row ", id, " of kv_head ", head, " does not ascend within [0, ",
                      context.tokens(), ")");
      }
      last = id;
    }
  }
  return absl::OkStatus();
}

// Of all that differs, so that a message fits into what gRPC sends as a status (8 KiB).
constexpr size_t kMostListedBytes = 4096;

std::string Shown(const std::string* value) {
  if (value == nullptr) return "none";
  return value->empty() ? "\"\"" : carrel::Shown(*value);
}

}  // namespace

absl::StatusOr<RowRange> ZoneOf(const OpenContext& context, int64_t sink, int64_t local) {
  const auto refuse = [&](const char* name, int64_t value) {
    return absl::InvalidArgumentError(
        absl::StrCat("open: ", name, "=", value, " is negative (context=", context.name(), ")"));
  };
  if (sink < 0) return refuse("sink", sink);
  if (local < 0) return refuse("local", local);
  const Position begin = std::min(sink, context.tokens());
  const Position end = std::max(begin, context.tokens() - std::min(local, context.tokens()));
  return RowRange{begin, end};
}

absl::Status ValidateQuery(const QueryRequest& r, const OpenContext& context,
                           const EngineConfig& config) {
  const Complaint refuse{"query", context, r.layer};
  RETURN_IF_ERROR(CheckLayer(refuse));
  if (context.manifest().key_position() == "none") {
    return absl::FailedPreconditionError(
        absl::StrCat("query: context ", context.name(),
                     " stores its keys before RoPE (key_position=none), where no score of a query "
                     "means anything: its rows can be fetched, not searched"));
  }
  if (r.tokens < 1) return refuse("queries hold no tokens");
  if (r.tokens > config.max_query_tokens) {
    return refuse("tokens=", r.tokens, " exceeds max_query_tokens=", config.max_query_tokens);
  }
  const int64_t floats = r.tokens * context.shape().q_heads * context.shape().head_dim;
  if (static_cast<int64_t>(r.queries.size()) != floats) {
    return refuse("queries hold ", r.queries.size(), " values instead of ", floats);
  }
  for (size_t i = 0; i < r.queries.size(); ++i) {
    if (!std::isfinite(r.queries[i])) return refuse("queries[", i, "] is ", r.queries[i]);
  }
  RETURN_IF_ERROR(CheckSelection(r, context, config, refuse));
  RETURN_IF_ERROR(CheckSpeculative(r, refuse));
  RETURN_IF_ERROR(CheckEstimate(r, context, refuse));
  RETURN_IF_ERROR(CheckHeld(r, context, refuse));
  if (r.effort < 0 || r.effort > kMaxEffort) {
    return refuse("effort=", r.effort, " is outside [0, ", kMaxEffort, "]");
  }
  return absl::OkStatus();
}

absl::Status ValidateFetch(const FetchRequest& r, const OpenContext& context,
                           const EngineConfig& config) {
  const Complaint refuse{"fetch rows", context, r.layer};
  RETURN_IF_ERROR(CheckLayer(refuse));
  const int64_t tokens = context.tokens(), kv_heads = context.shape().kv_heads;
  std::vector<bool> seen(kv_heads);
  for (KvHead head : r.kv_heads) {
    if (head.value() < 0 || head.value() >= kv_heads) {
      return refuse("kv_head=", head.value(), " is outside [0, ", kv_heads, ")");
    }
    if (seen[head.value()]) return refuse("kv_head=", head.value(), " is given twice");
    seen[head.value()] = true;
  }
  const int64_t heads = r.kv_heads.empty() ? kv_heads : static_cast<int64_t>(r.kv_heads.size());
  const int64_t limit = config.max_fetch_rows;
  if (r.by_ids) {
    const int64_t count = static_cast<int64_t>(r.ids.size());
    if (count == 0) return refuse("no ids");
    if (count > limit / heads) {
      return refuse(count, " rows of ", heads, " heads exceed max_fetch_rows=", limit);
    }
    absl::flat_hash_set<Position> ids;
    ids.reserve(r.ids.size());
    for (Position id : r.ids) {
      if (id < 0 || id >= tokens) return refuse("id=", id, " is outside [0, ", tokens, ")");
      if (!ids.insert(id).second) return refuse("id=", id, " is given twice");
    }
    return absl::OkStatus();
  }
  const auto [begin, end] = r.range;
  if (begin < 0 || end > tokens || begin >= end) {
    return refuse("range [", begin, ", ", end, ") is empty or not within [0, ", tokens, ")");
  }
  if (end - begin > limit / heads) {
    return refuse(end - begin, " rows of ", heads, " heads exceed max_fetch_rows=", limit);
  }
  return absl::OkStatus();
}

absl::Status CheckFingerprint(const FingerprintFields& context, const FingerprintFields& model) {
  if (model.empty()) {
    return absl::InvalidArgumentError("fingerprint is empty: the model must say what it is");
  }
  std::map<std::string, std::pair<const std::string*, const std::string*>> both;
  for (const auto& [name, value] : context) both[name].first = &value;
  for (const auto& [name, value] : model) {
    auto& slot = both[name].second;
    if (slot != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("fingerprint has the field ", Shown(&name), " twice"));
    }
    slot = &value;
  }
  std::vector<std::string> differing;
  size_t listed_bytes = 0;
  for (const auto& [name, values] : both) {
    const auto& [has, presented] = values;
    if (has != nullptr && presented != nullptr && *has == *presented) continue;
    differing.push_back(
        absl::StrCat(Shown(&name), ": context has ", Shown(has), ", model has ", Shown(presented)));
    listed_bytes += differing.back().size();
    if (listed_bytes > kMostListedBytes) {  // wholly different: the rest says nothing more
      differing.push_back("...");
      break;
    }
  }
  if (differing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("fingerprint mismatch: ", absl::StrJoin(differing, "; ")));
}

}  // namespace carrel::kvstore
