#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/storage/store.h"
#include "synth/synth.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/index_flags.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

struct SynthFlags {
  std::string like;
  std::string from_store;
  IndexFlags index;
  int threads = 0;
  bool quiet = false;
  bool json = false;
  synth::SynthConfig config;
};

nlohmann::json FitJson(const synth::HeadFit& fit) {
  return {{"query_key_gap", fit.gap},
          {"entropy_nats", fit.entropy},
          {"keys_for_75_mass", fit.keys_for_75_mass},
          {"peak", fit.peak}};
}

void Print(const SynthFlags& flags, const synth::SynthReport& report) {
  if (flags.json) {
    nlohmann::json layers = nlohmann::json::array();
    for (const synth::LayerFit& layer : report.layers) {
      layers.push_back({{"layer", layer.layer},
                        {"source_layer", layer.source_layer},
                        {"topic_share", layer.source.topic_share},
                        {"source", FitJson(layer.source)},
                        {"result", FitJson(layer.made)}});
    }
    const nlohmann::json json = {{"name", flags.config.name},
                                 {"like", flags.like},
                                 {"tokens", flags.config.tokens},
                                 {"layers", report.shape.layers},
                                 {"q_heads", report.shape.q_heads},
                                 {"kv_heads", report.shape.kv_heads},
                                 {"head_dim", report.shape.head_dim},
                                 {"index", flags.index.kind},
                                 {"seconds", report.seconds},
                                 {"draw_seconds", report.draw_seconds},
                                 {"stored_bytes", report.stored_bytes},
                                 {"index_bytes", report.index_bytes},
                                 {"fit", layers}};
    PrintJson(json);
    return;
  }
  absl::PrintF(
      "%s: %d tokens x %d layers x %d KV heads x %d in %.1f s, of which drawing %.1f s; %s "
      "stored\n",
      flags.config.name, flags.config.tokens, report.shape.layers, report.shape.kv_heads,
      report.shape.head_dim, report.seconds, report.draw_seconds, FormatBytes(report.stored_bytes));
  absl::PrintF(
      "source / result, at the positions sampled in the source:\n"
      "layer (like)   query-key gap   entropy (nats)   keys for 75%% mass     peak\n");
  for (const synth::LayerFit& layer : report.layers) {
    const synth::HeadFit& from = layer.source;
    const synth::HeadFit& made = layer.made;
    absl::PrintF("%5d (%d)     %6.2f / %-6.2f %7.2f / %-6.2f %9.1f / %-8.1f %6.2f / %-6.2f\n",
                 layer.layer, layer.source_layer, from.gap, made.gap, from.entropy, made.entropy,
                 from.keys_for_75_mass, made.keys_for_75_mass, from.peak, made.peak);
  }
}

absl::Status RunSynthCommand(SynthFlags& flags) {
  ASSIGN_OR_RETURN(const int threads, ResolveThreads(flags.threads));
  RETURN_IF_ERROR(flags.index.Resolve());
  flags.config.index = flags.index.params;
  flags.config.auto_index = flags.index.auto_index;
  ThreadPool pool(threads - 1);
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.config.store_folder, kvstore::StoreMode::kReadWrite));
  std::unique_ptr<kvstore::Store> other;
  if (!flags.from_store.empty() && flags.from_store != flags.config.store_folder) {
    ASSIGN_OR_RETURN(other, kvstore::Store::Open(flags.from_store, kvstore::StoreMode::kReadOnly));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<const kvstore::StoredContext> source,
                   (other != nullptr ? other : store)->OpenContext(flags.like));
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  const absl::StatusOr<synth::SynthReport> report =
      synth::RunSynth(flags.config, *source, *store, &pool, progress);
  progress.Clear();
  if (!report.ok()) {
    return Annotate(report.status(), absl::StrCat("synth of \"", flags.config.name, "\""));
  }
  Print(flags, *report);
  return absl::OkStatus();
}

}  // namespace

void AddSynth(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<SynthFlags>();
  synth::SynthConfig& config = flags->config;
  CLI::App& command = *app.add_subcommand(
      "synth",
      "Make a context of any shape and length that looks like a stored one, to measure with");
  command.add_option("--like", flags->like, "the context to take after")->required();
  command.add_option("--store", config.store_folder, "folder of the store; created if absent")
      ->required();
  command.add_option("--from-store", flags->from_store,
                     "folder of the store of --like, if another");
  command.add_option("--name", config.name, "name of the new context")->required();
  command.add_option("--tokens", config.tokens, "rows per layer and KV head")->required();
  command.add_option("--layers", config.shape.layers, "0: as many as --like has");
  command.add_option("--kv-heads", config.shape.kv_heads, "0: as many as --like has");
  command.add_option("--q-heads", config.shape.q_heads, "0: groups as large as those of --like");
  command.add_option("--head-dim", config.shape.head_dim, "0: as --like; even");
  command.add_option("--rope-theta", config.rope_theta, "0: as --like");
  flags->index.Declare(command);
  command.add_option("--summaries", flags->config.summary_rows, kSummariesHelp);
  command.add_option("--segment-tokens", config.segment_tokens,
                     "rows per stored segment, a power of two");
  command.add_option("--sampled-queries", config.sampled_queries,
                     "queries kept per layer and head");
  command.add_option("--seed", config.seed, "of everything drawn");
  command.add_option("--threads", flags->threads, "0: one per core");
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "report as one JSON object");
  command.callback([flags, &chosen] { chosen = [flags] { return RunSynthCommand(*flags); }; });
}

}  // namespace carrel::tools
