#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/storage/store.h"
#include "prefill/reindex.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/index_flags.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

struct ReindexFlags {
  prefill::ReindexConfig config;
  IndexFlags index;
  int threads = 0;
  bool quiet = false;
  bool json = false;
};

absl::Status RunReindex(ReindexFlags& flags) {
  ASSIGN_OR_RETURN(const int threads, ResolveThreads(flags.threads));
  RETURN_IF_ERROR(flags.index.Resolve());
  flags.config.index = flags.index.params;
  flags.config.auto_index = flags.index.auto_index;
  ThreadPool pool(threads - 1);
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.config.store_folder, kvstore::StoreMode::kReadWrite));
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  const absl::StatusOr<prefill::PrefillReport> report =
      prefill::Reindex(flags.config, *store, &pool, progress);
  progress.Clear();
  if (!report.ok()) {
    return Annotate(report.status(), absl::StrCat("reindex of \"", flags.config.from, "\""));
  }
  if (flags.json) {
    const nlohmann::json json = {
        {"name", flags.config.name},          {"from", flags.config.from},
        {"tokens", report->tokens},           {"index", flags.index.kind},
        {"seconds", report->seconds},         {"stored_bytes", report->stored_bytes},
        {"index_bytes", report->index_bytes}, {"summary_bytes", report->summary_bytes}};
    PrintJson(json);
    return absl::OkStatus();
  }
  absl::PrintF("%s: rows of %s with index %s in %.1f s, %s stored of which %s index\n",
               flags.config.name, flags.config.from, flags.index.kind, report->seconds,
               FormatBytes(report->stored_bytes), FormatBytes(report->index_bytes));
  if (report->probe_tokens == 0)
    absl::PrintF("fidelity is measured on the document's own queries: a probe's are not kept\n");
  return absl::OkStatus();
}

}  // namespace

void AddReindex(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<ReindexFlags>();
  CLI::App& command = *app.add_subcommand(
      "reindex", "Make a context with the rows of another one and a different index or summaries");
  command.add_option("NAME", flags->config.from, "the context whose rows it gets")->required();
  command.add_option("--store", flags->config.store_folder, "folder of the store")->required();
  command.add_option("--as", flags->config.name, "name of the new context")->required();
  flags->index.Declare(command);
  command.add_option("--summaries", flags->config.summary_rows, kSummariesHelp);
  command.add_option("--threads", flags->threads, "0: one per core");
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "report as one JSON object");
  command.callback([flags, &chosen] {
    chosen = [flags] {
      return WithNames(RunReindex(*flags), {.folder = flags->config.store_folder},
                       flags->config.from);
    };
  });
}

}  // namespace carrel::tools
