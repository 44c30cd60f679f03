// carrel push | pull | gc
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/remote/pull.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/push_stream.h"
#include "kvstore/remote/sweep.h"
#include "kvstore/service/context_client.h"
#include "library/move_context.h"
#include "serving/jobs/job_board.h"
#include "tools/carrel/bucket_flags.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct MoveFlags {
  StoreFlags store;
  BucketFlags bucket;
  std::string name, uri, as;
  int streams = 4;
  bool quiet = false;
  bool json = false;
};

Progress ProgressOf(const MoveFlags& flags) {
  return Progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
}

absl::StatusOr<kvstore::Pushed> PushFromFolder(const MoveFlags& flags, library::StoreAccess& store,
                                               const kvstore::Bucket& bucket, Progress& progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextExport> from,
                   store.store()->Export(flags.name));
  return kvstore::PushContext(
      bucket, *from, flags.as,
      [&](int64_t done, int64_t all) {
        progress.Update(static_cast<double>(done) / static_cast<double>(all), flags.uri);
      },
      {.threads = flags.streams});
}

absl::StatusOr<kvstore::Pushed> PushFromServer(const MoveFlags& flags, library::StoreAccess& store,
                                               const kvstore::Bucket& bucket, Progress& progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store.NewContextClient());
  kvstore::StreamPush push(bucket, flags.as, std::filesystem::temp_directory_path().string(),
                           {.threads = flags.streams});
  int64_t done = 0;
  RETURN_IF_ERROR(client->Export(flags.name, [&](absl::string_view piece) {
    done += static_cast<int64_t>(piece.size());
    const int64_t all = std::max(push.bytes(), done);
    progress.Update(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(1, all)),
                    flags.uri);
    return push.Take(piece);
  }));
  return push.Finish();
}

absl::Status RunPush(const MoveFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.bucket.Open(flags.uri));
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  Progress progress = ProgressOf(flags);
  const absl::StatusOr<kvstore::Pushed> pushed =
      store->store() != nullptr ? PushFromFolder(flags, *store, *bucket, progress)
                                : PushFromServer(flags, *store, *bucket, progress);
  progress.Clear();
  RETURN_IF_ERROR(pushed.status());
  const std::string name = flags.as.empty() ? flags.name : flags.as;
  return Report(flags.json,
                {{"name", name},
                 {"content_id", pushed->content_id},
                 {"bytes", pushed->bytes},
                 {"sent_bytes", pushed->sent_bytes},
                 {"was_there", pushed->was_there}},
                absl::StrFormat("%s %s: %s, of which %s sent, content id %s\n",
                                pushed->was_there ? "there already:" : "pushed", name,
                                FormatBytes(pushed->bytes), FormatBytes(pushed->sent_bytes),
                                pushed->content_id));
}

absl::Status RunPull(const MoveFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.bucket.Open(flags.uri));
  Progress progress = ProgressOf(flags);
  kvstore::PullOptions options{.threads = flags.streams, .ahead = 2 * flags.streams};
  options.tell = [](const std::string& text) { absl::FPrintF(stderr, "%s\n", text); };
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::BucketStream> stream,
                   kvstore::BucketStream::Open(*bucket, flags.name, options));
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> into,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadWrite));
  absl::StatusOr<v1::ImportReply> imported;
  const absl::Status status =
      kvstore::PullContext(*stream, [&](const kvstore::StreamSourceFn& source) {
        imported =
            library::ImportContext(*into, flags.as, source, [&](int64_t position, int64_t bytes) {
              if (bytes > 0) progress.Update(static_cast<double>(position) / bytes, flags.uri);
            });
        return imported.status();
      });
  progress.Clear();
  RETURN_IF_ERROR(status);
  return Report(flags.json,
                {{"name", imported->name()},
                 {"content_id", imported->content_id()},
                 {"bytes", imported->bytes()}},
                absl::StrFormat("pulled %s: %s, content id %s\n", imported->name(),
                                FormatBytes(imported->bytes()), imported->content_id()));
}

struct GcFlags {
  BucketFlags bucket;
  std::string uri;
  std::string grace = "24h";
  bool dry_run = false;
  bool json = false;
};

absl::Status RunGc(const GcFlags& flags) {
  kvstore::SweepOptions options{.dry_run = flags.dry_run};
  if (!absl::ParseDuration(flags.grace, &options.grace) || options.grace < absl::ZeroDuration() ||
      options.grace > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--grace ", flags.grace, " must be 0s to 8760h, for example 24h or 30m"));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.bucket.Open(flags.uri));
  ASSIGN_OR_RETURN(const kvstore::Swept swept, kvstore::CollectGarbage(*bucket, options));
  ASSIGN_OR_RETURN(const serving::SweptJobs jobs,
                   serving::SweepJobs(serving::JobBoard(*bucket), options.grace, flags.dry_run));
  if (flags.json) {
    nlohmann::json unreadable = nlohmann::json::array();
    for (const absl::Status& status : swept.unreadable) unreadable.push_back(status.message());
    PrintJson({{"dry_run", flags.dry_run},
               {"contexts", swept.contexts},
               {"files", swept.files},
               {"bytes", swept.bytes},
               {"uploads", swept.uploads},
               {"names", swept.names},
               {"records", swept.records},
               {"jobs", jobs.ended},
               {"job_leftovers", jobs.leftovers},
               {"young", swept.young},
               {"pushed", swept.pushed},
               {"unreadable", unreadable}});
  } else {
    absl::PrintF(
        "%s %d contexts without a name, %d files (%s), %d uploads; spared %d "
        "within the grace, %d being pushed\n",
        flags.dry_run ? "would remove" : "removed", swept.contexts, swept.files,
        FormatBytes(swept.bytes), swept.uploads, swept.young, swept.pushed);
    if (jobs.ended > 0 || jobs.leftovers > 0) {
      absl::PrintF("%s %d jobs that ended, %d objects of no job\n",
                   flags.dry_run ? "would remove" : "removed", jobs.ended, jobs.leftovers);
    }
  }
  for (const absl::Status& status : swept.unreadable) {
    absl::FPrintF(stderr, "left alone: %s\n", status.message());
  }
  if (swept.unreadable.empty()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("gc: ", swept.unreadable.size(), " of the bucket's contexts were left alone"));
}

CLI::App& Declare(CLI::App& app, const char* name, const char* description,
                  const std::shared_ptr<MoveFlags>& flags) {
  CLI::App& command = *app.add_subcommand(name, description);
  command.add_option("NAME", flags->name, "the context")->required();
  command.add_option("BUCKET", flags->uri, "s3://BUCKET or s3://BUCKET/PREFIX")->required();
  flags->store.Declare(command);
  command.add_option("--as", flags->as, "its name there; by default as it is");
  command.add_option("--streams", flags->streams, "requests on their way at once")
      ->check(CLI::Range(1, 64));
  flags->bucket.Declare(command);
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "report as one JSON object");
  return command;
}

}  // namespace

void AddBucket(CLI::App& app, Run& chosen) {
  auto push = std::make_shared<MoveFlags>();
  Declare(app, "push",
          "Send a context into a bucket: visible there wholly or not at all; once interrupted, the "
          "same command goes on",
          push)
      .callback([push, &chosen] {
        chosen = [push] { return WithNames(RunPush(*push), push->store, push->name); };
      });

  auto pull = std::make_shared<MoveFlags>();
  Declare(
      app, "pull",
      "Take a context out of a bucket: verified before it is visible; once interrupted, the same "
      "command goes on",
      pull)
      .callback([pull, &chosen] { chosen = [pull] { return RunPull(*pull); }; });

  auto gc = std::make_shared<GcFlags>();
  CLI::App& command = *app.add_subcommand(
      "gc",
      "Remove from a bucket what nobody needs: files of pushes that ended nowhere, and what "
      "removals left");
  command.add_option("--store", gc->uri, "s3://BUCKET or s3://BUCKET/PREFIX")->required();
  command.add_option("--grace", gc->grace, "what is younger stays, by the server's clock");
  command.add_flag("--dry-run", gc->dry_run, "say what would be removed, and remove nothing");
  gc->bucket.Declare(command);
  command.add_flag("--json", gc->json, "one JSON object");
  command.callback([gc, &chosen] { chosen = [gc] { return RunGc(*gc); }; });
}

}  // namespace carrel::tools
