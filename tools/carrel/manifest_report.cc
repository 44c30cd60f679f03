#include "tools/carrel/manifest_report.h"

#include <algorithm>
#include <cstdio>
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

nlohmann::json HeadIndexesToJson(const v1::Manifest& manifest) {
  nlohmann::json heads = nlohmann::json::array();
  for (const v1::HeadIndex& head : manifest.head_indexes()) {
    heads.push_back({{"layer", head.layer()},
                     {"kv_head", head.kv_head()},
                     {"index", IndexToJson(head.index())},
                     {"wanted", head.wanted()},
                     {"recall", head.recall()},
                     {"mass", head.mass()},
                     {"cost_us", head.cost_us()},
                     {"exact_us", head.exact_us()}});
  }
  return heads;
}

int64_t ProbedValues(const v1::Manifest& manifest) {
  int64_t values = 0;
  for (const v1::WeightsProbe::Tensor& tensor : manifest.weights_probe().tensors()) {
    values += static_cast<int64_t>(tensor.values().size()) / (tensor.dtype() == "f32" ? 4 : 2);
  }
  return values;
}

nlohmann::json FidelityToJson(const v1::Manifest& manifest) {
  nlohmann::json heads = nlohmann::json::array();
  for (const v1::HeadFidelity& head : manifest.head_fidelity()) {
    heads.push_back({{"layer", head.layer()},
                     {"kv_head", head.kv_head()},
                     {"queries", head.queries()},
                     {"probe_queries", head.probe_queries()},
                     {"output", head.output()},
                     {"rows", std::vector<uint32_t>(head.rows().begin(), head.rows().end())},
                     {"error", std::vector<float>(head.error().begin(), head.error().end())},
                     {"error_without",
                      std::vector<float>(head.error_without().begin(), head.error_without().end())},
                     {"estimate", head.estimate()},
                     {"spread_share", head.spread_share()}});
  }
  return heads;
}

std::string ContextIdText(const v1::Manifest& manifest) {
  const absl::StatusOr<kvstore::ContextId> id = kvstore::ContextIdOf(manifest);
  return id.ok() ? id->ToString() : "";
}

}  // namespace

std::string ManifestJson(const v1::Manifest& manifest) {
  nlohmann::json fingerprint = nlohmann::json::object();
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields())
    fingerprint[field.name()] = field.value();
  nlohmann::json heads = nlohmann::json::array();
  for (const v1::HeadStatistics& head : manifest.head_statistics()) {
    heads.push_back({{"layer", head.layer()},
                     {"q_head", head.q_head()},
                     {"entropy_nats", head.entropy_nats()},
                     {"keys_for_75_mass", head.keys_for_75_mass()},
                     {"samples", head.samples()}});
  }
  nlohmann::json layers = nlohmann::json::array();
  for (const v1::LayerSizes& layer : manifest.layer_sizes()) {
    layers.push_back({{"layer", layer.layer()},
                      {"key_bytes", layer.key_bytes()},
                      {"value_bytes", layer.value_bytes()},
                      {"index_bytes", layer.index_bytes()},
                      {"summary_bytes", layer.summary_bytes()},
                      {"sampled_query_bytes", layer.sampled_query_bytes()},
                      {"query_drift_bytes", layer.query_drift_bytes()}});
  }
  const nlohmann::json index = IndexToJson(manifest.index());
  const Sizes sizes = TotalSizes(manifest);
  const nlohmann::json json = {{"name", manifest.name()},
                               {"format_version", manifest.format_version()},
                               {"context_id", ContextIdText(manifest)},
                               {"content_id", manifest.content_id()},
                               {"created_unix_s", manifest.created_unix_s()},
                               {"program_version", manifest.program_version()},
                               {"tokens", manifest.tokens()},
                               {"layers", manifest.layers()},
                               {"q_heads", manifest.q_heads()},
                               {"kv_heads", manifest.kv_heads()},
                               {"head_dim", manifest.head_dim()},
                               {"kv_dtype", manifest.kv_dtype()},
                               {"key_position", manifest.key_position()},
                               {"prefill_attention", manifest.prefill_attention()},
                               {"prefill_rope", manifest.prefill_rope()},
                               {"segment_tokens", manifest.segment_tokens()},
                               {"prefill_seconds", manifest.prefill_seconds()},
                               {"fingerprint", fingerprint},
                               {"token_ids_sha256", manifest.token_ids_sha256()},
                               {"weights_probe",
                                {{"tensors", manifest.weights_probe().tensors_size()},
                                 {"values", ProbedValues(manifest)},
                                 {"bytes", manifest.weights_probe().ByteSizeLong()}}},
                               {"index", index},
                               {"summary_rows", manifest.summary_rows()},
                               {"sampled_queries", manifest.sampled_queries()},
                               {"bytes",
                                {{"keys", sizes.keys},
                                 {"values", sizes.values},
                                 {"index", sizes.index},
                                 {"summaries", sizes.summaries},
                                 {"sampled_queries", sizes.sampled_queries},
                                 {"query_drift", sizes.query_drift}}},
                               {"layer_bytes", layers},
                               {"head_indexes", HeadIndexesToJson(manifest)},
                               {"probe_tokens", manifest.probe().token_ids_size()},
                               {"head_fidelity", FidelityToJson(manifest)},
                               {"head_statistics", heads}};
  return DumpJson(json);
}

namespace {

void PrintHeadTable(const v1::Manifest& manifest, const char* title,
                    float (v1::HeadStatistics::*value)() const) {
  std::printf("\n%s\nlayer", title);
  for (uint32_t h = 0; h < manifest.q_heads(); ++h) std::printf(" %7u", h);
  for (int i = 0; i < manifest.head_statistics_size(); ++i) {
    const v1::HeadStatistics& head = manifest.head_statistics(i);
    if (head.q_head() == 0) std::printf("\n%5u", head.layer());
    std::printf(" %7.*f", value == &v1::HeadStatistics::entropy_nats ? 2 : 0, (head.*value)());
  }
  std::printf("\n");
}

// What "auto" chose, and what it measured on queries that built nothing.
void PrintHeadIndexes(const v1::Manifest& manifest) {
  if (manifest.head_indexes().empty()) return;
  std::printf("\nindex by layer and KV head, measured when it was chosen\n");
  std::printf("%5s %7s %-6s %7s %7s %7s %9s %9s\n", "layer", "KV head", "kind", "effort", "recall",
              "mass", "us", "exact us");
  for (const v1::HeadIndex& head : manifest.head_indexes()) {
    std::printf("%5u %7u %-6s %7u %7.3f %7.3f %9.1f %9.1f\n", head.layer(), head.kv_head(),
                head.index().kind().c_str(), head.index().effort(), head.recall(), head.mass(),
                head.cost_us(), head.exact_us());
  }
}

// Rows that each KV head gets for the named fidelities, and what its term counts.
void PrintFidelity(const v1::Manifest& manifest) {
  const retrieval::ContextFacts facts = decoder::FactsOf(manifest);
  const absl::StatusOr<std::vector<decoder::HeadErrors>> heads =
      decoder::ErrorsOf(facts, facts.summary_rows > 0);
  if (!heads.ok()) {
    std::printf("\nfidelity was not measured\n");
    return;
  }
  std::printf("\nrows per KV head for fast, balanced and faithful (errors");
  std::vector<decoder::RowPlan> plans;
  for (const decoder::Fidelity fidelity :
       {decoder::Fidelity::kFast, decoder::Fidelity::kBalanced, decoder::Fidelity::kFaithful}) {
    plans.push_back(decoder::PlanRows(*heads, 0, std::max<int64_t>(1, manifest.tokens()),
                                      decoder::TargetError(fidelity)));
    std::printf(" %.3f", plans.back().error);
  }
  std::printf(
      "), measured on %s, and the share of the spread that its estimation term counts (-: no "
      "term)",
      decoder::MeasuredOnProbe(facts)
          ? absl::StrFormat("a probe of %d tokens", manifest.probe().token_ids_size()).c_str()
          : "the document's own queries");
  for (int i = 0; i < manifest.head_fidelity_size(); ++i) {
    const v1::HeadFidelity& head = manifest.head_fidelity(i);
    if (head.kv_head() == 0) std::printf("\n%5u", head.layer());
    const auto at = static_cast<size_t>(i);
    const std::string share =
        head.estimate() ? absl::StrFormat("%.2f", head.spread_share()) : std::string("-");
    std::printf("  %5lld %5lld %5lld %4s", static_cast<long long>(plans[0].rows[at]),
                static_cast<long long>(plans[1].rows[at]),
                static_cast<long long>(plans[2].rows[at]), share.c_str());
  }
  std::printf("\n");
}

}  // namespace

void PrintManifest(const v1::Manifest& manifest) {
  const Sizes sizes = TotalSizes(manifest);
  std::printf(
      "%s: %lld tokens, %u layers, %u q heads, %u KV heads, head_dim %u, %s keys and values, keys "
      "%s\n",
      manifest.name().c_str(), static_cast<long long>(manifest.tokens()), manifest.layers(),
      manifest.q_heads(), manifest.kv_heads(), manifest.head_dim(), manifest.kv_dtype().c_str(),
      manifest.key_position().c_str());
  std::printf(
      "created %s by carrel %s in %.1f s; context id %s, format %u, segments of %lld tokens\n",
      FormatTime(manifest.created_unix_s()).c_str(), manifest.program_version().c_str(),
      manifest.prefill_seconds(), ContextIdText(manifest).c_str(), manifest.format_version(),
      static_cast<long long>(manifest.segment_tokens()));
  if (manifest.content_id().empty()) {
    std::printf(
        "unbound: files of format %u may be mixed with those of another store unseen; carrel "
        "upgrade %s binds them\n",
        manifest.format_version(), manifest.name().c_str());
  } else {
    std::printf("content id %s\n", manifest.content_id().c_str());
  }
  std::printf("index %s", manifest.index().kind().c_str());
  const nlohmann::json index = IndexToJson(manifest.index());
  for (const auto& [name, value] : index.items()) {
    if (name != "kind") std::printf(" %s=%s", name.c_str(), DumpJson(value).c_str());
  }
  std::printf("\nkeys %s, values %s, index %s, sampled queries %s (%lld per layer and q head)\n",
              FormatBytes(sizes.keys).c_str(), FormatBytes(sizes.values).c_str(),
              FormatBytes(sizes.index).c_str(), FormatBytes(sizes.sampled_queries).c_str(),
              static_cast<long long>(manifest.sampled_queries()));
  if (manifest.summary_rows() > 0) {
    std::printf("summaries of clusters of about %u rows: %s\n", manifest.summary_rows(),
                FormatBytes(sizes.summaries).c_str());
  } else {
    std::printf("no summaries\n");
  }
  if (sizes.query_drift > 0) {
    std::printf("drift of predicted queries: %s\n", FormatBytes(sizes.query_drift).c_str());
  } else {
    std::printf("no drift of predicted queries\n");
  }
  if (!manifest.prefill_attention().empty()) {
    std::printf("prefilled with attention %s, positions %s\n", manifest.prefill_attention().c_str(),
                manifest.prefill_rope().c_str());
  }
  PrintHeadIndexes(manifest);
  std::printf("\nfingerprint\n");
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields())
    std::printf("  %-28s %s\n", field.name().c_str(), field.value().c_str());
  std::printf("  %-28s %s\n", "(document) token_ids_sha256", manifest.token_ids_sha256().c_str());
  if (manifest.weights_probe().tensors().empty()) {
    std::printf("  no sampled weights: no others can be shown to be made from these\n");
  } else {
    std::printf("  %lld sampled values of %d tensors: --weights derived can be asked\n",
                static_cast<long long>(ProbedValues(manifest)),
                manifest.weights_probe().tensors_size());
  }
  if (manifest.head_statistics().empty()) {
    std::printf("\nno statistics of attention: keys are stored before RoPE\n");
    return;
  }
  PrintFidelity(manifest);
  PrintHeadTable(manifest, "entropy of attention in nats, by layer and q head (sampled queries)",
                 &v1::HeadStatistics::entropy_nats);
  PrintHeadTable(manifest, "keys that carry 75% of the mass, by layer and q head (sampled queries)",
                 &v1::HeadStatistics::keys_for_75_mass);
}

}  // namespace carrel::tools
