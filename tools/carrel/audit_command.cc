// carrel audit: a context's own index against exact search.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "audit/audit.h"
#include "audit/audit_report.h"
#include "audit/html_report.h"
#include "audit/summary.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/given_files.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

struct AuditFlags {
  std::string name;
  std::string store_folder;
  std::optional<std::string> html;
  int threads = 0;
  bool json = false;
  audit::AuditConfig config;
};

absl::Status CheckWanted(const audit::AuditReport& report) {
  constexpr size_t kNamed = 8;
  const std::vector<const audit::HeadAudit*> below = audit::HeadsBelow(report);
  if (below.empty()) return absl::OkStatus();
  std::string message =
      absl::StrCat("recall is below want_recall=", *report.config.want_recall, " in ", below.size(),
                   " of ", report.heads.size(), " heads of context ", report.context, ":");
  for (size_t i = 0; i < std::min(below.size(), kNamed); ++i) {
    absl::StrAppend(&message, i == 0 ? " " : ", ", "layer=", below[i]->layer.value(),
                    " kv_head=", below[i]->kv_head.value(), " recall=", below[i]->judged.recall);
  }
  if (below.size() > kNamed) absl::StrAppend(&message, ", ...");
  return absl::FailedPreconditionError(message);
}

absl::Status RunAuditCommand(const AuditFlags& flags) {
  ASSIGN_OR_RETURN(const int threads, ResolveThreads(flags.threads));
  if (flags.html.has_value()) RETURN_IF_ERROR(CheckPage(*flags.html));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.store_folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::shared_ptr<const kvstore::StoredContext> context,
                   store->OpenContext(flags.name));
  ThreadPool pool(threads - 1);
  const Progress::Mode mode = Progress::ModeFor(stderr);
  Progress progress(mode == Progress::Mode::kTerminal ? mode : Progress::Mode::kQuiet);
  absl::StatusOr<audit::AuditReport> report =
      audit::RunAudit(*context, flags.config, &pool, progress);
  progress.Clear();
  RETURN_IF_ERROR(report.status());
  if (flags.html.has_value()) {
    RETURN_IF_ERROR(WriteFileAtomically(*flags.html, audit::HtmlReport(*report)));
  }
  if (flags.json) {
    PrintJson(audit::AuditJson(*report));
  } else {
    std::fputs(audit::AuditTables(*report).c_str(), stdout);
  }
  return CheckWanted(*report);
}

}  // namespace

void AddAudit(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<AuditFlags>();
  audit::AuditConfig& config = flags->config;
  CLI::App& command = *app.add_subcommand(
      "audit",
      "Compare a context's index with exact search on its stored queries, per layer and head");
  command.add_option("NAME", flags->name, "the context")->required();
  command.add_option("--store", flags->store_folder, "folder of the store")->required();
  command.add_option("--sample", config.sample,
                     "stored queries used per layer and head, spread evenly over positions; "
                     "default: all, at most 32");
  command.add_option("--want-recall", config.want_recall,
                     "fail if a head's mean recall is below, and seek each head's least effort "
                     "for it; in (0, 1]");
  command.add_option("--top-k", config.top_k, "rows wanted per search");
  command.add_option("--effort", config.efforts,
                     "efforts to measure (beam width, lists probed or rows scored exactly), the "
                     "first is judged; default: each head's own, among powers of two around it");
  command.add_option("--sink", config.sink, "first rows of the context, not searched");
  command.add_option("--local", config.local, "last rows of the context, not searched");
  command.add_option("--threads", flags->threads, "heads measured at a time; 0: one per core");
  command.add_flag("--json", flags->json, "one JSON object instead of tables");
  command.add_option("--html", flags->html, "also write a page with maps and curves to this file");
  command.callback([flags, &chosen] {
    chosen = [flags] {
      return WithNames(RunAuditCommand(*flags), {.folder = flags->store_folder}, flags->name);
    };
  });
}

}  // namespace carrel::tools
