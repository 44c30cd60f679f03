// carrel ls | inspect | rm
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/dump_rows.h"
#include "tools/carrel/store_access.h"

namespace carrel::tools {
namespace {

struct ContextsFlags {
  StoreFlags store;
  std::string name;
  std::string rows;
  bool json = false;
};

std::string FormatTime(int64_t unix_s) { return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixSeconds(unix_s), absl::LocalTimeZone()); }

absl::Status RunLs(const ContextsFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<StoreAccess> store, StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  ASSIGN_OR_RETURN(const v1::ListResponse list, client->List());
  if (flags.json) {
    nlohmann::json contexts = nlohmann::json::array();
    for (const v1::ListResponse::Summary& context : list.contexts()) {
      contexts.push_back({{"name", context.name()},
                          {"tokens", context.tokens()},
                          {"layers", context.layers()},
                          {"kv_heads", context.kv_heads()},
                          {"head_dim", context.head_dim()},
                          {"index", context.index_kind()},
                          {"bytes", context.bytes()},
                          {"created_unix_s", context.created_unix_s()}});
    }
    std::printf("%s\n", nlohmann::json{{"contexts", contexts}}.dump().c_str());
    return absl::OkStatus();
  }
  if (list.contexts().empty()) {
    std::printf("no contexts\n");
    return absl::OkStatus();
  }
  std::printf("%-24s %10s %6s %8s %8s %-6s %10s  %s\n", "NAME", "TOKENS", "LAYERS", "KV HEADS", "HEAD DIM", "INDEX", "SIZE", "CREATED");
  for (const v1::ListResponse::Summary& context : list.contexts()) {
    std::printf("%-24s %10lld %6u %8u %8u %-6s %10s  %s\n", context.name().c_str(), static_cast<long long>(context.tokens()), context.layers(),
                context.kv_heads(), context.head_dim(), context.index_kind().c_str(), FormatBytes(context.bytes()).c_str(),
                FormatTime(context.created_unix_s()).c_str());
  }
  return absl::OkStatus();
}

struct Sizes {
  int64_t keys = 0, values = 0, index = 0, summaries = 0, sampled_queries = 0;
};

Sizes TotalSizes(const v1::Manifest& manifest) {
  Sizes total;
  for (const v1::LayerSizes& layer : manifest.layer_sizes()) {
    total.keys += layer.key_bytes();
    total.values += layer.value_bytes();
    total.index += layer.index_bytes();
    total.summaries += layer.summary_bytes();
    total.sampled_queries += layer.sampled_query_bytes();
  }
  return total;
}

nlohmann::json IndexToJson(const v1::IndexSpec& spec) {
  nlohmann::json index = {{"kind", spec.kind()}};
  if (spec.kind() == "flat" || spec.kind() == "auto") return index;
  if (spec.m() != 0) index["m"] = spec.m();
  if (spec.ef_construction() != 0) index["ef_construction"] = spec.ef_construction();
  if (spec.code_bits() != 0) {
    index["code_bits"] = spec.code_bits();
    index["code_trained"] = spec.code_trained();
  }
  if (spec.kind() == "ivf") index["ivf_lists"] = spec.ivf_lists();
  index["effort"] = spec.effort();
  return index;
}

nlohmann::json ManifestJson(const v1::Manifest& manifest) {
  nlohmann::json fingerprint = nlohmann::json::object();
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields()) fingerprint[field.name()] = field.value();
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
                      {"sampled_query_bytes", layer.sampled_query_bytes()}});
  }
  const nlohmann::json index = IndexToJson(manifest.index());
  const Sizes sizes = TotalSizes(manifest);
  return {{"name", manifest.name()},
          {"format_version", manifest.format_version()},
          {"context_id", manifest.context_id()},
          {"created_unix_s", manifest.created_unix_s()},
          {"program_version", manifest.program_version()},
          {"tokens", manifest.tokens()},
          {"layers", manifest.layers()},
          {"q_heads", manifest.q_heads()},
          {"kv_heads", manifest.kv_heads()},
          {"head_dim", manifest.head_dim()},
          {"kv_dtype", manifest.kv_dtype()},
          {"key_position", manifest.key_position()},
          {"segment_tokens", manifest.segment_tokens()},
          {"prefill_seconds", manifest.prefill_seconds()},
          {"fingerprint", fingerprint},
          {"token_ids_sha256", manifest.token_ids_sha256()},
          {"index", index},
          {"summary_rows", manifest.summary_rows()},
          {"sampled_queries", manifest.sampled_queries()},
          {"bytes",
           {{"keys", sizes.keys},
            {"values", sizes.values},
            {"index", sizes.index},
            {"summaries", sizes.summaries},
            {"sampled_queries", sizes.sampled_queries}}},
          {"layer_bytes", layers},
          {"head_statistics", heads}};
}

void PrintHeadTable(const v1::Manifest& manifest, const char* title, float (v1::HeadStatistics::*value)() const) {
  std::printf("\n%s\nlayer", title);
  for (uint32_t h = 0; h < manifest.q_heads(); ++h) std::printf(" %7u", h);
  for (int i = 0; i < manifest.head_statistics_size(); ++i) {
    const v1::HeadStatistics& head = manifest.head_statistics(i);
    if (head.q_head() == 0) std::printf("\n%5u", head.layer());
    std::printf(" %7.*f", value == &v1::HeadStatistics::entropy_nats ? 2 : 0, (head.*value)());
  }
  std::printf("\n");
}

void PrintManifest(const v1::Manifest& manifest) {
  const Sizes sizes = TotalSizes(manifest);
  std::printf("%s: %lld tokens, %u layers, %u q heads, %u KV heads, head_dim %u, %s keys and values, keys %s\n", manifest.name().c_str(),
              static_cast<long long>(manifest.tokens()), manifest.layers(), manifest.q_heads(), manifest.kv_heads(), manifest.head_dim(),
              manifest.kv_dtype().c_str(), manifest.key_position().c_str());
  std::printf("created %s by carrel %s in %.1f s; context id %llu, format %u, segments of %lld tokens\n",
              FormatTime(manifest.created_unix_s()).c_str(), manifest.program_version().c_str(), manifest.prefill_seconds(),
              static_cast<unsigned long long>(manifest.context_id()), manifest.format_version(), static_cast<long long>(manifest.segment_tokens()));
  std::printf("index %s", manifest.index().kind().c_str());
  const nlohmann::json index = IndexToJson(manifest.index());
  for (const auto& [name, value] : index.items()) {
    if (name != "kind") std::printf(" %s=%s", name.c_str(), value.dump().c_str());
  }
  std::printf("\nkeys %s, values %s, index %s, sampled queries %s (%lld per layer and q head)\n", FormatBytes(sizes.keys).c_str(),
              FormatBytes(sizes.values).c_str(), FormatBytes(sizes.index).c_str(), FormatBytes(sizes.sampled_queries).c_str(),
              static_cast<long long>(manifest.sampled_queries()));
  if (manifest.summary_rows() > 0) {
    std::printf("summaries of clusters of about %u rows: %s\n", manifest.summary_rows(), FormatBytes(sizes.summaries).c_str());
  } else {
    std::printf("no summaries\n");
  }
  std::printf("\nfingerprint\n");
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields()) std::printf("  %-28s %s\n", field.name().c_str(), field.value().c_str());
  std::printf("  %-28s %s\n", "(document) token_ids_sha256", manifest.token_ids_sha256().c_str());
  PrintHeadTable(manifest, "entropy of attention in nats, by layer and q head (sampled queries)", &v1::HeadStatistics::entropy_nats);
  PrintHeadTable(manifest, "keys that carry 75% of the mass, by layer and q head (sampled queries)", &v1::HeadStatistics::keys_for_75_mass);
}

absl::Status RunInspect(const ContextsFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  if (!flags.rows.empty() && flags.store.folder.empty()) {
    return absl::InvalidArgumentError("--rows reads the stored rows and needs --store");
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<StoreAccess> store, StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(flags.name));
  if (!flags.rows.empty()) RETURN_IF_ERROR(DumpRows(flags.store.folder, flags.name, flags.rows));
  if (flags.json) {
    std::printf("%s\n", ManifestJson(manifest).dump().c_str());
  } else {
    PrintManifest(manifest);
  }
  return absl::OkStatus();
}

absl::Status RunRm(const ContextsFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<StoreAccess> store, StoreAccess::Open(flags.store, kvstore::StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  RETURN_IF_ERROR(client->Delete(flags.name));
  if (flags.json) {
    std::printf("%s\n", nlohmann::json{{"removed", flags.name}}.dump().c_str());
  } else {
    std::printf("removed %s\n", flags.name.c_str());
  }
  return absl::OkStatus();
}

CLI::App& Declare(CLI::App& app, const char* name, const char* description, const std::shared_ptr<ContextsFlags>& flags) {
  CLI::App& command = *app.add_subcommand(name, description);
  flags->store.Declare(command);
  command.add_flag("--json", flags->json, "one JSON object");
  return command;
}

}  // namespace

void AddContexts(CLI::App& app, Run& chosen) {
  auto ls = std::make_shared<ContextsFlags>();
  Declare(app, "ls", "List the contexts of a store", ls).callback([ls, &chosen] { chosen = [ls] { return RunLs(*ls); }; });

  auto inspect = std::make_shared<ContextsFlags>();
  CLI::App& inspect_command = Declare(app, "inspect", "Show a context: manifest, sizes, index, and how attention looks per layer and head", inspect);
  inspect_command.add_option("NAME", inspect->name, "the context")->required();
  inspect_command.add_option("--rows", inspect->rows, "also write every K and V row to this safetensors file (k.LAYER, v.LAYER [kv_heads, tokens, head_dim])");
  inspect_command.callback([inspect, &chosen] { chosen = [inspect] { return RunInspect(*inspect); }; });

  auto rm = std::make_shared<ContextsFlags>();
  CLI::App& rm_command = Declare(app, "rm", "Remove a context and free its space", rm);
  rm_command.add_option("NAME", rm->name, "the context")->required();
  rm_command.callback([rm, &chosen] { chosen = [rm] { return RunRm(*rm); }; });
}

}  // namespace carrel::tools
