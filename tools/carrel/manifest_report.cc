#include "tools/carrel/manifest_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/progress.h"
#include "decoder/client/wire.h"
#include "decoder/fidelity.h"
#include "kvstore/format/manifest.h"
#include "kvstore/index/index.h"
#include "tools/carrel/json_report.h"

namespace carrel::tools {

std::string FormatTime(int64_t unix_s) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixSeconds(unix_s),
                          absl::LocalTimeZone());
}

namespace {

struct Sizes {
  int64_t keys = 0, values = 0, index = 0, summaries = 0, sampled_queries = 0, query_drift = 0;
};

Sizes TotalSizes(const v1::Manifest& manifest) {
  Sizes total;
  for (const v1::LayerSizes& layer : manifest.layer_sizes()) {
    total.keys += layer.key_bytes();
    total.values += layer.value_bytes();
    total.index += layer.index_bytes();
    total.summaries += layer.summary_bytes();
    total.sampled_queries += layer.sampled_query_bytes();
    total.query_drift += layer.query_drift_bytes();
  }
  return total;
}

nlohmann::json IndexToJson(const v1::IndexSpec& spec) {
  nlohmann::json index = {{"kind", spec.kind()}};
  if (spec.kind() == "flat") return index;
  if (spec.kind() == "auto") {
    index["want_recall"] = spec.want_recall();
    index["wanted"] = spec.wanted();
    return index;
  }
  if (spec.m() != 0) index["m"] = spec.m();
  if (spec.ef_construction() != 0) index["ef_construction"] = spec.ef_construction();
  if (spec.code_bits() != 0) {
    index["code_bits"] = spec.code_bits();
    index["code_training"] =
        kvstore::CodeTrainingName(static_cast<kvstore::CodeTraining>(spec.code_training()));
    index["code_scan"] = kvstore::CodeScanName(static_cast<kvstore::CodeScan>(spec.code_scan()));
  }
  if (spec.kind() == "ivf") index["ivf_lists"] = spec.ivf_lists();
  index["effort"] = spec.effort();
  return index;
}

int64_t ProbedValues(const v1::Manifest& manifest) {
  int64_t values = 0;
  for (const v1::WeightsProbe::Tensor& tensor : manifest.weights_probe().tensors()) {
    values += static_cast<int64_t>(tensor.values().size()) / (tensor.dtype() == "f32" ? 4 : 2);
  }
  return values;
}

std::string ContextIdText(const v1::Manifest& manifest) {
  const absl::StatusOr<kvstore::ContextId> id = kvstore::ContextIdOf(manifest);
  return id.ok() ? id->ToString() : "";
}

}  // namespace

nlohmann::json ManifestJson(const v1::Manifest& manifest) {
  nlohmann::json json = JsonOf(manifest, {"number", "context_id", "segment_digests", "fingerprint",
                                          "index", "probe", "weights_probe"});
  json["context_id"] = ContextIdText(manifest);
  json["fingerprint"] = nlohmann::json::object();
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields())
    json["fingerprint"][field.name()] = field.value();
  json["index"] = IndexToJson(manifest.index());
  for (size_t i = 0; i < json["head_indexes"].size(); ++i) {
    json["head_indexes"][i]["index"] =
        IndexToJson(manifest.head_indexes(static_cast<int>(i)).index());
  }
  json["probe_tokens"] = manifest.probe().token_ids_size();
  json["weights_probe"] = {{"tensors", manifest.weights_probe().tensors_size()},
                           {"values", ProbedValues(manifest)},
                           {"bytes", manifest.weights_probe().ByteSizeLong()}};
  Rename(json, "layer_sizes", "layer_bytes");
  const Sizes sizes = TotalSizes(manifest);
  json["bytes"] = {{"keys", sizes.keys},
                   {"values", sizes.values},
                   {"index", sizes.index},
                   {"summaries", sizes.summaries},
                   {"sampled_queries", sizes.sampled_queries},
                   {"query_drift", sizes.query_drift}};
  return json;
}

namespace {

void PrintHeadTable(const v1::Manifest& manifest, const char* title,
                    float (v1::HeadStatistics::*value)() const) {
  absl::PrintF("\n%s\nlayer", title);
  for (uint32_t h = 0; h < manifest.q_heads(); ++h) absl::PrintF(" %7u", h);
  for (int i = 0; i < manifest.head_statistics_size(); ++i) {
    const v1::HeadStatistics& head = manifest.head_statistics(i);
    if (head.q_head() == 0) absl::PrintF("\n%5u", head.layer());
    absl::PrintF(" %7.*f", value == &v1::HeadStatistics::entropy_nats ? 2 : 0, (head.*value)());
  }
  absl::PrintF("\n");
}

// What "auto" chose, and what it measured on queries that built nothing.
void PrintHeadIndexes(const v1::Manifest& manifest) {
  if (manifest.head_indexes().empty()) return;
  absl::PrintF("\nindex by layer and KV head, measured when it was chosen\n");
  absl::PrintF("%5s %7s %-6s %7s %7s %7s %9s %9s\n", "layer", "KV head", "kind", "effort", "recall",
               "mass", "us", "exact us");
  for (const v1::HeadIndex& head : manifest.head_indexes()) {
    absl::PrintF("%5u %7u %-6s %7u %7.3f %7.3f %9.1f %9.1f\n", head.layer(), head.kv_head(),
                 head.index().kind(), head.index().effort(), head.recall(), head.mass(),
                 head.cost_us(), head.exact_us());
  }
}

// Rows that each KV head gets for the named fidelities, and what its term counts.
void PrintFidelity(const v1::Manifest& manifest) {
  const retrieval::ContextFacts facts = decoder::FactsOf(manifest);
  const absl::StatusOr<std::vector<decoder::HeadErrors>> heads =
      decoder::ErrorsOf(facts, facts.summary_rows > 0);
  if (!heads.ok()) {
    absl::PrintF("\nfidelity was not measured\n");
    return;
  }
  absl::PrintF("\nrows per KV head for fast, balanced and faithful (errors");
  std::vector<decoder::RowPlan> plans;
  for (const decoder::Fidelity fidelity :
       {decoder::Fidelity::kFast, decoder::Fidelity::kBalanced, decoder::Fidelity::kFaithful}) {
    plans.push_back(decoder::PlanRows(*heads, 0, std::max<int64_t>(1, manifest.tokens()),
                                      decoder::TargetError(fidelity)));
    absl::PrintF(" %.3f", plans.back().error);
  }
  absl::PrintF(
      "), measured on %s, and the share of the spread that its estimation term counts (-: no "
      "term)",
      decoder::MeasuredOnProbe(facts)
          ? absl::StrFormat("a probe of %d tokens", manifest.probe().token_ids_size())
          : "the document's own queries");
  for (int i = 0; i < manifest.head_fidelity_size(); ++i) {
    const v1::HeadFidelity& head = manifest.head_fidelity(i);
    if (head.kv_head() == 0) absl::PrintF("\n%5u", head.layer());
    const auto at = static_cast<size_t>(i);
    const std::string share =
        head.estimate() ? absl::StrFormat("%.2f", head.spread_share()) : std::string("-");
    absl::PrintF("  %5d %5d %5d %4s", plans[0].rows[at], plans[1].rows[at], plans[2].rows[at],
                 share);
  }
  absl::PrintF("\n");
}

}  // namespace

void PrintManifest(const v1::Manifest& manifest) {
  const Sizes sizes = TotalSizes(manifest);
  absl::PrintF(
      "%s: %d tokens, %u layers, %u q heads, %u KV heads, head_dim %u, %s keys and values, keys "
      "%s\n",
      manifest.name(), manifest.tokens(), manifest.layers(), manifest.q_heads(),
      manifest.kv_heads(), manifest.head_dim(), manifest.kv_dtype(), manifest.key_position());
  absl::PrintF(
      "created %s by carrel %s in %.1f s; context id %s, format %u, segments of %d tokens\n",
      FormatTime(manifest.created_unix_s()), manifest.program_version(), manifest.prefill_seconds(),
      ContextIdText(manifest), manifest.format_version(), manifest.segment_tokens());
  if (manifest.content_id().empty()) {
    absl::PrintF(
        "unbound: files of format %u may be mixed with those of another store unseen; carrel "
        "upgrade %s binds them\n",
        manifest.format_version(), manifest.name());
  } else {
    absl::PrintF("content id %s\n", manifest.content_id());
  }
  absl::PrintF("index %s", manifest.index().kind());
  const nlohmann::json index = IndexToJson(manifest.index());
  for (const auto& [name, value] : index.items()) {
    if (name != "kind") absl::PrintF(" %s=%s", name, DumpJson(value));
  }
  absl::PrintF("\nkeys %s, values %s, index %s, sampled queries %s (%d per layer and q head)\n",
               FormatBytes(sizes.keys), FormatBytes(sizes.values), FormatBytes(sizes.index),
               FormatBytes(sizes.sampled_queries), manifest.sampled_queries());
  if (manifest.summary_rows() > 0) {
    absl::PrintF("summaries of clusters of about %u rows: %s\n", manifest.summary_rows(),
                 FormatBytes(sizes.summaries));
  } else {
    absl::PrintF("no summaries\n");
  }
  if (sizes.query_drift > 0) {
    absl::PrintF("drift of predicted queries: %s\n", FormatBytes(sizes.query_drift));
  } else {
    absl::PrintF("no drift of predicted queries\n");
  }
  if (!manifest.prefill_attention().empty()) {
    absl::PrintF("prefilled with attention %s, positions %s\n", manifest.prefill_attention(),
                 manifest.prefill_rope());
  }
  PrintHeadIndexes(manifest);
  absl::PrintF("\nfingerprint\n");
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields())
    absl::PrintF("  %-28s %s\n", field.name(), field.value());
  absl::PrintF("  %-28s %s\n", "(document) token_ids_sha256", manifest.token_ids_sha256());
  if (manifest.weights_probe().tensors().empty()) {
    absl::PrintF("  no sampled weights: no others can be shown to be made from these\n");
  } else {
    absl::PrintF("  %d sampled values of %d tensors: --weights derived can be asked\n",
                 ProbedValues(manifest), manifest.weights_probe().tensors_size());
  }
  if (manifest.head_statistics().empty()) {
    absl::PrintF("\nno statistics of attention: keys are stored before RoPE\n");
    return;
  }
  PrintFidelity(manifest);
  PrintHeadTable(manifest, "entropy of attention in nats, by layer and q head (sampled queries)",
                 &v1::HeadStatistics::entropy_nats);
  PrintHeadTable(manifest, "keys that carry 75% of the mass, by layer and q head (sampled queries)",
                 &v1::HeadStatistics::keys_for_75_mass);
}

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
